"""A running job remembers each network alert, and evicts a machine at its second alert."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.model.finding import Finding, Health, MachineFinding, Owner
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.machine import Machine
from workflows.job_incidents import ObservedFaults

BEGAN_NS = 1_800_000_000 * 10**9
DOWN, FLAP = ("nic-down", Health.FAULTY), ("nic-flap", Health.UNKNOWN)


class Running:
    """A running job of eight machines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machines = [Machine(name=f"m{number}", address=f"127.0.0.1:{9000 + number}") for number in range(8)]
        spec = JobSpec(name="gpt", machines=8, ranks_per_machine=1, script="/train.py")
        self.state = JobState(spec=spec, machines=machines)
        self.state.status, self.state.generation = "running", 1
        self.now_ns = BEGAN_NS
        monkeypatch.setattr("workflows.job_incidents.workflow.time_ns", lambda: self.now_ns)
        incidents: Any = None
        self.faults = ObservedFaults(self.state, incidents)

    def hears(self, alert: tuple[str, Health], at_s: float, item: str = "eth0") -> tuple[bool, bool]:
        """Return whether an alert that begins at ``at_s`` opens an incident, and whether its machine leaves."""
        began_ns = BEGAN_NS + round(at_s * 1e9)
        self.now_ns = began_ns + 2 * 10**9
        reason, verdict = alert
        finding = Finding(
            inspection="link", reason=reason, item=item, verdict=verdict, owner=Owner.NETWORK, since_ns=began_ns
        )
        about = MachineFinding(machine="m3", finding=finding)
        anomaly = Anomaly(
            id=f"m3-{at_s:g}",
            generation=1,
            symptom=Symptom.MACHINE_FAULT,
            headline=about.headline,
            machines=["m3"],
            seen_ns=began_ns,
            findings=[about],
        )
        self.state.observed = []
        self.faults.accept(anomaly)
        opened = list(self.state.observed)
        return bool(opened), any(self.faults._is_to_leave(one) for one in opened)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Running:
    return Running(monkeypatch)


@pytest.mark.parametrize("item", ["eth0", "eth1"])
def test_the_second_outage_within_five_minutes_evicts_for_any_port(job: Running, item: str) -> None:
    assert job.hears(DOWN, 0) == (True, False)
    assert job.hears(DOWN, 120, item) == (True, True)


def test_flaps_of_two_ports_count_together(job: Running) -> None:
    assert job.hears(FLAP, 0) == (False, False), "one flap opens no incident"
    assert job.hears(FLAP, 120, "eth1") == (True, True)


@pytest.mark.parametrize("again_s", [0, 10, 400])
def test_a_repeated_or_much_later_alert_evicts_no_machine(job: Running, again_s: float) -> None:
    job.hears(DOWN, 0)

    assert job.hears(DOWN, again_s) == (False, False), "a fault of the same part is recorded only once in an hour"


def test_an_alert_during_an_incident_counts_later(job: Running) -> None:
    job.state.status = "recovering"
    assert job.hears(FLAP, 0, "eth1") == (False, False)
    job.state.status = "running"

    assert job.hears(DOWN, 120) == (True, True)
