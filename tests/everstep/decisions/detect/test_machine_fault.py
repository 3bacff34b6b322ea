"""A machine that an inspection found faulty while its ranks still run, and which finding explains the end of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep.decisions.blame.first_failure import NEAR_S, WITHIN_S, explanation
from everstep.decisions.detect.job_facts import FindingSeen
from everstep.decisions.detect.machine_fault import FINDINGS_WHOLE, MACHINE_FAULT, PendingFaults, without
from everstep.model.evidence import RankExit
from everstep.model.finding import Finding, Health, MachineFinding, Owner
from everstep.model.incident import Symptom
from tests.everstep.decisions.detect.job_facts import S, facts, seen
from tests.rank_ends import exited

LOST: dict[str, Any] = {"inspection": "gpu", "reason": "gpu-lost", "item": "GPU 3", "text": "it is lost", "sure": True}


def noted(heard_s: float = 98.0, **fields: Any) -> FindingSeen:
    finding = Finding(**(LOST | {"since_ns": 90 * S} | fields))
    return FindingSeen(id="m1-7", machine="m1", finding=finding, heard_ns=round(heard_s * S))


def test_a_fault_is_reported_once_no_rank_has_ended_with_it() -> None:
    """The rule waits a moment, since a rank may end because of the fault."""
    assert MACHINE_FAULT.find(facts(findings=[noted(heard_s=99.5)])) is None
    anomaly = MACHINE_FAULT.find(facts(findings=[noted()]))
    assert anomaly is not None
    assert (anomaly.id, anomaly.symptom, anomaly.machines, anomaly.seen_ns) == (
        "m1-7",
        Symptom.MACHINE_FAULT,
        ["m1"],
        90 * S,
    )
    assert anomaly.headline == "m1: GPU 3: it is lost (gpu-lost)"
    assert anomaly.findings[0].finding.reason == "gpu-lost"


@pytest.mark.parametrize("verdict", [Health.UNKNOWN, Health.HEALTHY, Health("of a later release")])
def test_only_the_verdict_faulty_is_reported(verdict: Health) -> None:
    assert MACHINE_FAULT.find(facts(findings=[noted(verdict=verdict)])) is None


@pytest.mark.parametrize(("owner", "told"), [(Owner.NETWORK, True), (Owner.UNKNOWN, False)])
def test_a_link_that_came_back_is_reported_if_the_job_uses_it(owner: Owner, told: bool) -> None:
    flap = noted(reason="nic-flap", item="eth0", verdict=Health.UNKNOWN, owner=owner)
    pending = PendingFaults()
    pending.note(flap, over=False)

    assert pending.all() == ([flap] if told else [])
    assert bool(MACHINE_FAULT.find(facts(findings=[flap]))) is told


def test_where_a_rank_ended_its_incident_has_the_finding() -> None:
    """The incident of the rank's end gets the finding, so the finding opens no incident of its own."""
    assert MACHINE_FAULT.find(facts(seen(0, signal=9), findings=[noted()])) is None
    assert MACHINE_FAULT.find(facts(findings=[noted()], lost={"m1": [1]})) is None
    assert MACHINE_FAULT.find(facts(findings=[noted()], newest=False)) is None


def many(machines: int, heard_s: float = 50.0, **fields: Any) -> list[FindingSeen]:
    return [
        replace(noted(heard_s, evidence=["a", "b"], **fields), id=f"m{number}-7", machine=f"m{number}")
        for number in range(machines)
    ]


def test_what_a_thousand_machines_find_at_the_same_time_is_one_anomaly() -> None:
    anomaly = MACHINE_FAULT.find(facts(findings=many(1000)))
    assert anomaly is not None
    assert anomaly.headline == "m0: GPU 3: it is lost (gpu-lost), and 999 more such faults, on 1000 machines together"
    assert (len(anomaly.machines), len(anomaly.findings), anomaly.more_findings) == (
        1000,
        FINDINGS_WHOLE,
        1000 - FINDINGS_WHOLE,
    )
    assert [len(found.finding.evidence) for found in anomaly.findings[:3]] == [2, 1, 1]


def test_faults_of_several_machines_are_gathered_and_a_single_fault_is_not_delayed() -> None:
    later = many(3, 93)
    assert MACHINE_FAULT.find(facts(findings=later)) is None
    anomaly = MACHINE_FAULT.find(facts(findings=[*many(1, 90), *later[1:]]))
    assert anomaly is not None
    assert anomaly.machines == ["m0", "m1", "m2"]
    assert MACHINE_FAULT.find(facts(findings=many(1, 98))) is not None


def test_faults_of_a_reason_that_was_reported_lately_are_gathered() -> None:
    reported = {"gpu-lost": 70 * S}
    assert MACHINE_FAULT.find(facts(findings=many(1, 95), faults_accepted=reported)) is None
    assert MACHINE_FAULT.find(facts(findings=many(1, 90), faults_accepted=reported)) is not None
    assert MACHINE_FAULT.find(facts(findings=many(1, 95), faults_accepted={"gpu-lost": 30 * S})) is not None


def test_a_fault_of_another_reason_does_not_wait_for_those_that_are_gathered() -> None:
    anomaly = MACHINE_FAULT.find(facts(findings=[*many(3, 95), noted(reason="disk-full")]))
    assert anomaly is not None
    assert anomaly.findings[0].finding.reason == "disk-full"


def test_faults_of_several_parts_of_one_machine_are_reported_at_once() -> None:
    anomaly = MACHINE_FAULT.find(facts(findings=[noted(item=f"GPU {number}") for number in (3, 1, 2)]))
    assert anomaly is not None
    assert anomaly.headline == "m1: GPU 1: it is lost (gpu-lost), and 2 more such faults"
    assert anomaly.machines == ["m1"]


def test_watchers_that_gathered_the_same_say_the_same_and_others_do_not() -> None:
    """Watchers that saw the same faults must report the same anomaly, with the same id."""
    one, same, other = (MACHINE_FAULT.find(facts(findings=found)) for found in (many(3), many(3)[::-1], many(4)))
    assert one is not None
    assert other is not None
    assert one == same
    assert one.id != other.id


def test_faults_that_were_reported_before_are_left_out() -> None:
    anomaly = MACHINE_FAULT.find(facts(findings=many(3)))
    assert anomaly is not None
    about = [found.about for found in anomaly.findings]
    assert without(anomaly, []) == anomaly
    assert without(anomaly, about) is None
    rest = without(anomaly, about[:2])
    assert rest is not None
    assert (rest.machines, rest.headline) == (["m2"], "m2: GPU 3: it is lost (gpu-lost)")


END_NS = 1_000 * S


def end(machine: str = "m0", *, victim: bool = False, signal: int | None = None, raised: str = "") -> RankExit:
    exception = raised
    if victim:
        exception = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4213"
    tail = f'Traceback (most recent call last):\n  File "t.py", line 1, in main\n{exception}\n' if exception else ""
    code = None if signal else 1
    return exited(rank=2, machine=machine, signal=signal, code=code, time_ns=END_NS, exception=exception, log_tail=tail)


def on(machine: str, *, ago_s: float = 5.0, **fields: Any) -> MachineFinding:
    finding = Finding(**(LOST | {"since_ns": END_NS - round(ago_s * S)} | fields))
    return MachineFinding(machine=machine, finding=finding)


KILLED: dict[str, Any] = {"reason": "oom-kill-limit", "verdict": Health.UNKNOWN, "sure": False}


@pytest.mark.parametrize(
    ("finding", "ended", "explains"),
    [
        (on("m0"), end(), True),
        (on("m0", sure=False), end(), True),
        (on("m0", verdict=Health.UNKNOWN), end(), False),
        (on("m1"), end(), False),
        (on("m1"), end(victim=True), True),
        (on("m1", sure=False), end(victim=True), False),
        (on("m1"), None, True),
        (on("m1", sure=False), None, False),
        (on("m0", ago_s=WITHIN_S + 60), end(), False),
        (on("m0", ago_s=NEAR_S + 60), end(), True),
        (on("m0", ago_s=NEAR_S + 60, sure=False), end(), False),
        (on("m0", ago_s=WITHIN_S + 60, last_ns=END_NS - 5 * S), end(), True),
        (on("m1", ago_s=WITHIN_S + 60), None, False),
        (on("m0"), end(raised="KeyError: 'lr'"), False),
        (on("m0", item="rank 2 of other", **KILLED), end(signal=9), False),
        (on("m0", ago_s=-1), end(), True),
        (on("m0", item="rank 2 of gpt", **KILLED), end(signal=9), True),
        (on("m0", item="rank 2 of gpt", **KILLED), end(), False),
        (on("m0", item="rank 3 of gpt", **KILLED), end(signal=9), False),
        (on("m1", item="rank 2 of gpt", **KILLED), end(signal=9), False),
    ],
)
def test_what_explains_an_end(finding: MachineFinding, ended: RankExit | None, explains: bool) -> None:
    assert (explanation([finding], ended, job="gpt", seen_ns=END_NS) is not None) is explains


def test_that_this_rank_was_killed_for_memory_comes_before_a_fault_of_its_machine() -> None:
    killed = on("m0", item="rank 2 of gpt", **KILLED)
    assert explanation([on("m0"), on("m1"), killed], end(signal=9), job="gpt", seen_ns=END_NS) == killed
