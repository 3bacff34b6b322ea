"""How the time of a job's runs was spent, by causes, as computed from the ledger's rows."""

from __future__ import annotations

import pytest

from activities.ledger.ledger import Ledger
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.stage import StageRecord

S = 10**9
ID = "incident/gpt/0001"


def running(ledger: Ledger) -> None:
    """Record a job that steps from 1,010 s on, and hangs at 1,100 s. The hang is seen 4 s later."""
    ledger.job_started(JobSpec(name="gpt", script="/train.py"), started_ns=1000 * S)
    ledger.generation_launched("gpt", 1, resume_step=0, launched_ns=1000 * S)
    ledger.generation_stepped("gpt", 1, stepped_ns=1010 * S)
    anomaly = Anomaly(id="m2-7", generation=1, symptom=Symptom.HANG, headline="", seen_ns=1104 * S, quiet_s=4.0)
    ledger.incident_opened(ID, anomaly, opened_ns=1105 * S)


def report(resolution: str = "reattempt", **seconds: float) -> IncidentReport:
    return IncidentReport(
        headline="",
        resolution=resolution,
        cause="hang",
        step=20,
        lost_steps=0,
        evicted=[],
        stages=[],
        generation=2,
        recovered=True,
        seconds=20.0,
        failures=[],
        timings=[StageRecord(name=name, seconds=each) for name, each in seconds.items()],
    )


def lost(ledger: Ledger, job: str | int = "gpt", **options: object) -> list[dict[str, float]]:
    """Return for each period the causes that took time, with their seconds. Productive steps are left out."""
    spent = ledger.time_spent(job, now_ns=1200 * S, **options) or []  # type: ignore[arg-type]
    for one in spent:
        assert one.ettr.seconds["productive"] == one.causes["productive"]
    return [{cause: each for cause, each in one.causes.items() if each and cause != "productive"} for one in spent]


def test_the_causes_since_the_start_of_a_run_and_in_recent_periods(ledger: Ledger) -> None:
    running(ledger)
    ledger.incident_event(ID, 1, time_ns=1108 * S, stage="decide", text="")
    whole = {"start": 10, "detect": 5, "decide": 3}
    assert lost(ledger) == [whole | {"unknown": 92}]
    assert lost(ledger, parked={ID: True}) == [whole | {"parked": 92}]
    ledger.incident_closed(ID, report(stop=2, decide=3, reattempt=5, confirm=5), closed_ns=1120 * S)
    ledger.interval("gpt", start_ns=1120 * S, end_ns=1126 * S, kind="lost steps", cause=ID)
    whole = {"start": 10, "detect": 5, "decide": 5, "restart": 10, "recompute": 6}
    assert lost(ledger, since_ns=(None, 1112 * S, 1300 * S)) == [whole, {"restart": 8, "recompute": 6}, {}]
    # A later run of the same name is counted separately.
    ledger.job_ended("gpt", ended_ns=1150 * S, outcome="finished")
    ledger.job_started(JobSpec(name="gpt", script="/train.py"), started_ns=1160 * S)
    assert lost(ledger) == [{"start": 40}]
    first = min(ledger.jobs(), key=lambda job: job.started_ns)
    assert lost(ledger, first.run) == [whole]
    assert ledger.time_spent("moe", now_ns=1200 * S) is None
    assert ledger.time_spent(99, now_ns=1200 * S) is None


@pytest.mark.parametrize("kept", ["[7]", '{"timings": 7}', '{"timings": [{"name": "stop"}, 7]}'])
def test_the_cause_is_unknown_if_this_release_cannot_read_the_report(ledger: Ledger, kept: str) -> None:
    running(ledger)
    ledger.incident_closed(ID, report(), closed_ns=1120 * S)
    with ledger._writing("gpt") as connection:
        connection.exec_driver_sql(f"UPDATE incidents SET report = '{kept}'")
    assert lost(ledger) == [{"start": 10, "detect": 5, "unknown": 15}]


def test_a_fault_that_was_only_observed_costs_no_time(ledger: Ledger) -> None:
    running(ledger)
    assert lost(ledger) == [{"start": 10, "detect": 5, "decide": 95}]
    ledger.incident_closed(ID, report("observed"), closed_ns=1120 * S)
    assert lost(ledger) == [{"start": 10}]
