"""The verdict of a drill: which recoveries are correct, and how each problem is named."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drills.faults.all import drill_request
from drills.judge.compare import Comparison
from drills.judge.evictions import eviction_problems
from drills.judge.facts import DrillFacts, IncidentFacts, restored_from
from drills.judge.result import DrillResult
from drills.observe.observed import Absence, DrillObservations
from drills.observe.step_records import Records, ReportedStep
from drills.observe.stored_copies import Damaged
from drills.spec.loss import Promise
from drills.verdict import judge, summary
from everstep.model.incident import IncidentReport
from everstep.model.launch import Confirmation
from everstep.model.stage import StageRecord
from everstep.model.state_copy import StateCopies, Tier

SECOND = 10**9
KEYS = [
    *("fault", "fired", "detected_s", "recovered_s", "resolution", "stages", "evicted", "over_evicted"),
    *("steps_lost", "losses_match", "incidents", "ettr", "leaked"),
]


def records(*steps: int, generation: int = 1, loss: float = 0.5, ranks: int = 2) -> Records:
    made = [ReportedStep(step, generation, (100 + step) * SECOND, struct.pack("<d", loss + step)) for step in steps]
    return Records({rank: list(made) for rank in range(ranks)})


def report(**changed: Any) -> IncidentReport:
    values: dict[str, Any] = {
        "headline": "Recovered in 1.50 s",
        "resolution": "reattempt",
        "cause": "SIGKILL",
        "step": 3,
        "lost_steps": 1,
        "evicted": [],
        "stages": [],
        "generation": 2,
        "recovered": True,
        "seconds": 1.5,
        "failures": [],
        "confirmation": Confirmation(generation=2, ok=True, reason="", stepped_ns=12 * SECOND),
        "timings": [StageRecord(name="stop", seconds=0.25)],
    }
    return IncidentReport(**(values | changed))


def facts(**changed: Any) -> DrillFacts:
    found = DrillFacts(
        outcome="finished",
        generations=2,
        marks={"f0-7": {"time_ns": 10 * SECOND, "pid": 1}},
        incidents=[IncidentFacts("incident/job/0001", 10 * SECOND + SECOND // 4, report())],
        records=records(0, 1, 2, 3, 3, 4),
        comparison=Comparison(losses=[], state=[], compared=["losses", "the last state"]),
        ettr=0.9,
        samples=40,
        blind_s=0.2,
    )
    return replace(found, **changed)


REQUEST = drill_request(fault="kill-rank")
SPEC = REQUEST.spec("job", {})


def test_a_correct_recovery() -> None:
    result = judge(REQUEST, SPEC, facts())
    assert result.ok and result.problems == []
    assert (result.detected_s, result.recovered_s) == (0.25, 2.0)
    assert result.stages == [("stop", 0.25)]
    assert (result.steps_lost, result.steps_redone, result.losses_match) == (1, 1, True)
    assert set(KEYS) <= set(result.model_dump())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"marks": {"f0-7": None}}, "did not fire"),
        ({"marks": {}}, "no fault was planned"),
        ({"outcome": "failed"}, "did not finish"),
        ({"outcome": ""}, "did not finish"),
        ({"incidents": []}, "0 incidents were opened, and 1 are due"),
        ({"incidents": [IncidentFacts("incident/job/0001", 0, None)]}, "still open"),
        ({"incidents": [IncidentFacts("i", 0, report(recovered=False))]}, "not recovered"),
        ({"incidents": [IncidentFacts("i", 0, report(lost_steps=2))]}, "2 steps were lost, and at most 1 may be"),
        ({"records": records(0, 1, 2, 3, 4)}, "by the step records 0 were done again"),
        ({"comparison": Comparison(losses=["rank 0 has another loss at step 3"])}, "another loss"),
        ({"comparison": Comparison(losses=[], state=["rank 1 ends with another state"])}, "another state"),
        ({"comparison": Comparison(state=[], not_compared=["losses of all ranks"])}, "not compared: losses of all"),
        ({"generations": 7}, "launched 7 times, and 2 are enough"),
        ({"samples": 0}, "the processes were not sampled"),
        ({"blind_s": 11.0}, "the processes were not sampled for 11.0 s"),
        ({"leaked": ["/dev/shm/x"]}, "left behind: /dev/shm/x"),
        ({"duplicates": 1}, "two processes"),
    ],
)
def test_each_problem_is_named(changed: dict[str, Any], said: str) -> None:
    result = judge(REQUEST, SPEC, facts(**changed))
    assert not result.ok
    assert any(said in problem for problem in result.problems), result.problems


def test_a_killed_agent_must_cause_no_incident() -> None:
    request = drill_request(fault="kill-agent")
    calm = facts(
        incidents=[],
        generations=1,
        marks={"kill-agent": {"time_ns": 101 * SECOND}},
        records=records(0, 1, 2, 3, 4),
        seen=DrillObservations(Absence(101 * SECOND, 103 * SECOND + SECOND // 2)),
    )
    result = judge(request, SPEC, calm)
    assert result.ok, result.problems
    assert (result.resolution, result.recovered_s, result.incidents, result.steps_lost) == ("absorbed", 2.5, [], 0)
    stood = replace(calm, seen=DrillObservations(Absence(105 * SECOND, 109 * SECOND)))
    assert "the job did not step while the part was away" in judge(request, SPEC, stood).problems
    soon = replace(calm, seen=DrillObservations(Absence(105 * SECOND, 105 * SECOND + SECOND // 2)))
    assert judge(request, SPEC, soon).ok, "the agent was away for less than a step, so no step need be seen meanwhile"
    away = replace(calm, seen=DrillObservations(Absence(101 * SECOND, None)))
    assert "the killed part did not come back in time" in judge(request, SPEC, away).problems
    hurt = replace(calm, incidents=facts().incidents, generations=2)
    assert not judge(request, SPEC, hurt).ok


def lost(steps: int, **seen: Any) -> DrillFacts:
    """Return the facts after a strike that cost ``steps`` steps."""
    return facts(
        marks={"damage": {"time_ns": 1 * SECOND}, "strike": {"time_ns": 10 * SECOND}},
        incidents=[IncidentFacts("incident/job/0001", 11 * SECOND, report(lost_steps=steps))],
        records=records(*range(10), *range(10 - steps, 12)),
        seen=DrillObservations(**seen),
    )


def test_a_strike_may_cost_the_promised_steps_and_starts_the_clock() -> None:
    request = drill_request(fault="kill-machine")
    result = judge(request, SPEC, lost(4, promise=Promise(4, "step 6 is the latest")))
    assert result.ok, result.problems
    assert (result.steps_lost, result.steps_promised, result.detected_s) == (4, 4, 1.0)
    [problem] = judge(request, SPEC, lost(4, promise=Promise(1, "outside its groups"))).problems
    assert problem == "4 steps were lost, and at most 1 may be"
    nothing = Promise(4, "no step is left", begins_again=True)
    assert judge(request, SPEC, lost(4, promise=nothing)).problems == ["no step is left"]


def test_damaged_copies_and_emptied_machines_must_be_reported() -> None:
    request = drill_request(fault="flip-bit", where="file")
    damaged = Damaged(Path("rank-5.safetensors"), 5, 20, "bit 0 of byte 7 flipped")
    silent = lost(1, damaged=[damaged], emptied=["m2"])
    assert judge(request, SPEC, silent).problems == [
        "the incident does not name the damaged copy of rank 5",
        "the incident does not report that m2 came back empty",
    ]
    told = ["decide: … rank 5 on m2 (disk): its contents do not match their checksum", "m2 came back empty"]
    result = judge(request, SPEC, replace(silent, texts=told))
    assert result.ok, result.problems
    assert result.damaged == ["rank 5, step 20: rank-5.safetensors: bit 0 of byte 7 flipped"]


def test_full_file_systems_must_be_reported_and_full_memory_must_park_the_job() -> None:
    assert (
        "no agent reported a problem although disk is full"
        in judge(drill_request(fault="disk-full"), SPEC, lost(1)).problems
    )
    request = drill_request(fault="shm-full")
    parked = facts(outcome="failed", parked=True, texts=["stop: no room for a checkpoint file of 5.0 MB"])
    assert judge(request, SPEC, parked).ok
    assert judge(request, SPEC, replace(parked, texts=[])).problems == [
        "no incident gives the reason for parking: no room"
    ]
    assert not judge(request, SPEC, replace(parked, parked=False)).ok


def test_a_fault_that_no_replay_shows_must_park_the_job_without_an_eviction() -> None:
    request = drill_request(fault="bitflip", machine="m1", only_in_job=True, shows_every=0)
    said = "replay: not reproduced on groups of 2 machines in 4 runs: … is missed with probability 0.062, and …"
    parked = facts(outcome="failed", parked=True, incidents=[], texts=[said])
    assert judge(request, SPEC, parked).ok
    unreported = replace(parked, texts=["replay: not reproduced on groups of 2 machines"])
    assert judge(request, SPEC, unreported).problems == [
        "no incident gives the reason for parking: not reproduced on groups of, is missed with probability"
    ]
    assert not judge(request, SPEC, replace(parked, parked=False)).ok
    gone = eviction_problems(request, SPEC, ["m1"])
    assert gone == ["m1 left the job, and nothing is wrong with it"]


@pytest.mark.parametrize(("during", "ok"), [(1.2, True), (3.0, False)])
def test_a_peer_that_hangs_must_not_slow_training_down(during: float, ok: bool) -> None:
    times = [n * SECOND for n in range(100, 110)] + [int((110 + n * during) * SECOND) for n in range(10)]
    steps = [ReportedStep(step, 1, time, struct.pack("<d", step)) for step, time in enumerate(times)]
    calm = facts(
        incidents=[],
        generations=1,
        marks={"hang-peer": {"time_ns": 109 * SECOND}},
        records=Records({0: steps}),
        seen=DrillObservations(Absence(int(109.5 * SECOND), int(110 + 9 * during) * SECOND), lag=7),
    )
    request = drill_request(fault="hang-peer")
    result = judge(request, SPEC, calm)
    assert result.pace == pytest.approx(during)
    assert result.ok is ok, result.problems
    calm.seen.lag = 1
    assert any("did not fall behind" in problem for problem in judge(request, SPEC, calm).problems)


def test_the_reason_why_a_fault_could_not_be_injected_is_named() -> None:
    result = judge(REQUEST, SPEC, facts(marks={"strike": None}, seen=DrillObservations(trouble="step 8 was not saved")))
    assert result.problems[0] == "step 8 was not saved"


def test_ranks_without_a_copied_state_were_restored_from_their_own_memory() -> None:
    moved = [
        StateCopies.one(rank=4, completed_steps=20, tier=Tier.DISK, machine="m2"),  # this earlier choice failed
        StateCopies.one(rank=4, completed_steps=15, tier=Tier.BACKUP, machine="m1"),
        StateCopies.one(rank=5, completed_steps=15, tier=Tier.DISK, machine="m1"),
    ]
    assert restored_from(moved, 8, 15) == {"own memory": 6, "backup": 1, "disk": 1}


def test_repeated_failures_must_park_the_job() -> None:
    request = drill_request(fault="kill-rank", times=3)
    assert judge(request, SPEC, facts(outcome="failed", parked=True)).ok
    assert not judge(request, SPEC, facts(parked=False)).ok


def test_a_summary_has_median_p90_and_maximum() -> None:
    runs = [DrillResult(fault="kill-rank", ok=True, recovered_s=float(n), detected_s=0.1) for n in range(1, 11)]
    told = summary(runs)
    assert told["recovered_s"] == {"median": 5.5, "p90": 9.0, "max": 10.0}
    assert (told["runs"], told["ok"]) == (10, 10)
    assert summary([DrillResult(fault="kill-rank")])["recovered_s"] is None


def test_a_recovery_must_not_wait_for_the_ledger_which_must_have_it_later() -> None:
    request = drill_request(fault="kill-postgres")
    marks: dict[str, Any] = {"kill-postgres": {"time_ns": 9 * SECOND}, "strike": {"time_ns": 10 * SECOND}}
    away = facts(marks=marks, seen=DrillObservations(Absence(9 * SECOND, 20 * SECOND)))

    assert judge(request, SPEC, away).ok
    early = judge(request, SPEC, replace(away, seen=DrillObservations(Absence(9 * SECOND, 11 * SECOND))))
    assert early.problems == ["the job did not step again before the ledger was back"]
    assert judge(request, SPEC, replace(away, seen=DrillObservations())).problems == early.problems
    lacking = judge(request, SPEC, replace(away, ledger_lacks=["the end of the job"]))
    assert lacking.problems == ["the ledger lacks the end of the job"]
