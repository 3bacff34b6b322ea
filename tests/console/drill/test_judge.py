from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from console.drill.facts import Facts, IncidentFacts
from console.drill.inject import Absorbed
from console.drill.judge import judge, summary
from console.drill.losses import Record, Records, differences
from console.drill.request import DrillRequest
from console.drill.result import DrillResult
from everstep.incident import Confirmation, IncidentReport, Stage

SECOND = 10**9
KEYS = [
    *("fault", "fired", "detected_s", "recovered_s", "resolution", "stages", "evicted", "over_evicted"),
    *("steps_lost", "losses_match", "incidents", "ettr", "leaked"),
]


def records(*steps: int, generation: int = 1, loss: float = 0.5, ranks: int = 2) -> Records:
    made = [Record(step, generation, (100 + step) * SECOND, struct.pack("<d", loss + step)) for step in steps]
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
        "timings": [Stage(name="stop", seconds=0.25)],
    }
    return IncidentReport(**(values | changed))


def facts(**changed: Any) -> Facts:
    found = Facts(
        outcome="finished",
        generations=2,
        marks={"f0-7": {"time_ns": 10 * SECOND, "pid": 1}},
        incidents=[IncidentFacts("incident/job/0001", 10 * SECOND + SECOND // 4, report())],
        records=records(0, 1, 2, 3, 3, 4),
        differences=[],
        ettr=0.9,
    )
    return replace(found, **changed)


REQUEST = DrillRequest(fault="kill-rank")
SPEC = REQUEST.spec("job", {})


def test_a_recovery_as_it_should_be() -> None:
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
        ({"incidents": []}, "1 faults opened 0 incidents"),
        ({"incidents": [IncidentFacts("incident/job/0001", 0, None)]}, "still open"),
        ({"incidents": [IncidentFacts("i", 0, report(recovered=False))]}, "not recovered"),
        ({"incidents": [IncidentFacts("i", 0, report(lost_steps=2))]}, "2 steps lost"),
        ({"records": records(0, 1, 2, 3, 4)}, "the step records show 0 done again"),
        ({"differences": ["rank 0 has another loss at step 3"]}, "another loss"),
        ({"leaked": ["/dev/shm/x"]}, "left behind: /dev/shm/x"),
        ({"duplicates": 1}, "two copies"),
    ],
)
def test_what_is_not_right_is_named(changed: dict[str, Any], said: str) -> None:
    result = judge(REQUEST, SPEC, facts(**changed))
    assert not result.ok
    assert any(said in problem for problem in result.problems), result.problems


def test_a_killed_agent_deserves_that_nothing_happens() -> None:
    request = DrillRequest(fault="kill-agent")
    calm = facts(
        incidents=[],
        generations=1,
        marks={"kill-agent": {"time_ns": 101 * SECOND}},
        records=records(0, 1, 2, 3, 4),
        absorbed=Absorbed(101 * SECOND, 103 * SECOND + SECOND // 2),
    )
    result = judge(request, SPEC, calm)
    assert result.ok, result.problems
    assert (result.resolution, result.recovered_s, result.incidents, result.steps_lost) == ("absorbed", 2.5, [], 0)
    stood = replace(calm, absorbed=Absorbed(105 * SECOND, 109 * SECOND))
    assert "the job did not step while the part was away" in judge(request, SPEC, stood).problems
    away = replace(calm, absorbed=Absorbed(101 * SECOND, None))
    assert "the killed part did not come back in time" in judge(request, SPEC, away).problems
    hurt = replace(calm, incidents=facts().incidents, generations=2)
    assert not judge(request, SPEC, hurt).ok


def test_again_and_again_deserves_an_operator() -> None:
    request = DrillRequest(fault="kill-rank", times=3)
    assert judge(request, SPEC, facts(outcome="failed", parked=True)).ok
    assert not judge(request, SPEC, facts(parked=False)).ok


def test_losses_are_compared_bit_for_bit() -> None:
    reference = records(0, 1, 2)
    assert differences(reference, records(0, 1, 1, 2)) == []
    assert differences(Records(), records(0, 1)) is None
    silent = records(0, loss=float("nan"))
    assert differences(silent, silent) is None
    [missing, _] = differences(reference, records(0, 2)) or []
    assert missing == "rank 0 has no report of step 1"
    assert "step 3" in (differences(reference, records(0, 1, 2, 3)) or [""])[0]
    other = records(0, 1, 2)
    # The first attempt at a step must have the right bits as well, not only the last.
    other.of[1].insert(1, Record(1, 1, 0, struct.pack("<d", 1.5000000000000002)))
    assert differences(reference, other) == ["rank 1 has another loss at step 1"]


def test_tails_are_told() -> None:
    runs = [DrillResult(fault="kill-rank", ok=True, recovered_s=float(n), detected_s=0.1) for n in range(1, 11)]
    told = summary(runs)
    assert told["recovered_s"] == {"median": 5.5, "p90": 9.0, "max": 10.0}
    assert (told["runs"], told["ok"]) == (10, 10)
    assert summary([DrillResult(fault="kill-rank")])["recovered_s"] is None
