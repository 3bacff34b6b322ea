"""The parts of a recovery follow each other. No time is left out or counted twice."""

from __future__ import annotations

import pytest

from activities.agents.launch_ranks import LaunchRanks
from activities.agents.stop_ranks import StopRanks
from benchmarks.everstep_side import Times, recovery_of
from benchmarks.recovery import Results, summarise
from benchmarks.timeline import PARTS, UNACCOUNTED, Recovery, parts_between
from everstep.errors import EverstepError
from everstep.model.incident import Failure, IncidentReport, Symptom
from everstep.model.launch import Confirmation

S = 10**9


def test_parts_sum_up_to_the_total() -> None:
    parts = parts_between(10.0, 5 * S, [("a", 6 * S), ("b", 9 * S), ("c", 14 * S)])
    assert parts == {"a": 1.0, "b": 3.0, "c": 5.0, UNACCOUNTED: 1.0}


def test_the_time_of_a_part_whose_end_is_unknown_goes_to_the_next() -> None:
    parts = parts_between(9.0, 5 * S, [("a", 6 * S), ("b", 0), ("c", 14 * S)])
    assert parts == {"a": 1.0, "b": 0.0, "c": 8.0, UNACCOUNTED: 0.0}


def test_a_recovery_is_cut_at_the_fault_the_incident_and_the_milestones() -> None:
    within = {"start": 0.1, "import": 0.2, "rendezvous": 0.25, "restore": 0.05, "next step": 0.4}
    failure = Failure(generation=1, step=20, symptom=Symptom.CRASH, cause="SIGKILL", time_ns=105 * S)
    report = IncidentReport(
        headline="",
        resolution="reattempt",
        cause="SIGKILL",
        step=20,
        lost_steps=0,
        evicted=[],
        stages=[],
        generation=2,
        recovered=True,
        seconds=8.0,
        failures=[failure],
        confirmation=Confirmation(generation=2, ok=True, reason="", stepped_ns=110 * S, parts=within),
    )
    times = Times(
        scheduled={StopRanks.name: 102 * S, LaunchRanks.name: 106 * S},
        completed={StopRanks.name: 105 * S, LaunchRanks.name: 111 * S},
    )
    found = recovery_of(5, 20, report, times, fault_ns=100 * S, seen_ns=101 * S)
    assert found.seconds == 10.0
    expected = dict(zip(PARTS, (1.0, 1.0, 3.0, 1.0, 3.0, 0.1, 0.2, 0.25, 0.05, 0.4), strict=True))
    assert found.parts == pytest.approx({**expected, UNACCOUNTED: 0.0}, abs=1e-6)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    rows = {row.name: row for row in summarise(Results(ours=[found]))}
    assert rows["part: launch, median"].ours == pytest.approx(3.0)
    assert rows["fault to next step of all ranks, torchrun, median"].peer is None


def test_runs_that_did_not_come_back_are_said_of_both_sides() -> None:
    parts = dict.fromkeys((*PARTS, UNACCOUNTED), 0.1)
    results = Results(torchrun=[Recovery(1, 20, 9.0)] * 3, runs=3)
    with results.noting("everstep"):
        raise EverstepError("the job does not step again")
    assert results.failures == ["everstep: the job does not step again"]
    assert [(row.name, row.ours, row.peer) for row in summarise(results)] == [
        ("recovered, of 3 runs, torchrun", 0, 3),
        ("recovered, of 3 runs, nvrx", 0, 0),
    ]
    results.ours = [Recovery(1, 20, 0.6, parts)] * 2
    rows = {row.name: row.ours for row in summarise(results)}
    assert rows["recovered, of 3 runs, torchrun"] == 2
    assert rows["fault to next step of all ranks, median"] == 0.6
