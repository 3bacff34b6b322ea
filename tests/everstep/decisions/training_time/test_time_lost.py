"""The causes of lost time. They sum up to the time that ETTR does not count, and each follows from its stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.training_time.ettr import KINDS, QUIET, START, Interval, ettr
from everstep.decisions.training_time.time_lost import CAUSES, OF_STAGE, IncidentTimes, time_lost
from everstep.model.stage import Stage

S = 10**9
TIMES = st.integers(-5, 45)
ID = "incident/gpt/0001"


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    start = draw(TIMES)
    end = draw(st.none() | st.integers(start, 50))
    cause = draw(st.sampled_from([ID, "incident/gpt/0002", START, QUIET, ""]))
    return Interval(start * S, None if end is None else end * S, draw(st.sampled_from(KINDS)), cause)


@st.composite
def known_times(draw: st.DrawFn) -> IncidentTimes:
    names = st.sampled_from([*OF_STAGE, "of another release"])
    pairs = draw(st.lists(st.tuples(TIMES, st.integers(0, 9)), max_size=2))
    opened = draw(st.none() | TIMES)
    return IncidentTimes(
        None if opened is None else opened * S,
        stages=tuple(draw(st.lists(st.tuples(names, st.floats(0, 20)), max_size=5))),
        parked=tuple((begin * S, (begin + length) * S) for begin, length in sorted(pairs)),
        noted=tuple(draw(st.lists(st.tuples(names, TIMES.map(lambda time: time * S)), max_size=4))),
        parked_now=draw(st.none() | st.booleans()),
    )


@given(st.lists(intervals(), max_size=6), known_times(), st.integers(0, 40), st.none() | st.integers(0, 60))
def test_all_causes_sum_up_to_the_time_that_ettr_does_not_count(
    spans: list[Interval], times: IncidentTimes, now: int, window: int | None
) -> None:
    """Stages only divide the time of an incident. They never make it longer or shorter."""
    counted = ettr(spans, start_ns=0, now_ns=now * S, window_s=window)
    begin = 0 if window is None else max(0, now - window)
    causes = time_lost(spans, {ID: times}, begin_ns=begin * S, end_ns=now * S)
    assert tuple(causes) == CAUSES
    assert min(causes.values()) >= 0
    assert sum(causes.values()) == pytest.approx(now - begin)
    assert causes["productive"] == pytest.approx(counted.seconds["productive"])


def lost(times: IncidentTimes | None, *more: Interval, end: float | None = 200, now: float = 300) -> dict[str, float]:
    """Return the causes, with their seconds, of an incident after the step at 100 s."""
    spans = [Interval(100 * S, None if end is None else round(end * S), "recovery", ID), *more]
    causes = time_lost(spans, {ID: times} if times else {}, begin_ns=0, end_ns=round(now * S))
    return {cause: seconds for cause, seconds in causes.items() if seconds and cause != "productive"}


def test_the_stages_of_a_report_divide_an_incident() -> None:
    stages = ((Stage.STOP, 2.0), (Stage.EVICT, 5.0), (Stage.DECIDE, 1.0), (Stage.RESTORE, 10.0))
    tries = ((Stage.REATTEMPT, 20.0), (Stage.CONFIRM, 52.0))
    assert lost(
        IncidentTimes(110 * S, (*stages, *tries)),
        Interval(200 * S, 205 * S, "lost steps", ID),
        Interval(0, S, "launch"),
    ) == {"detect": 10, "decide": 3, "evict": 5, "restart": 83, "recompute": 5}


def test_time_outside_the_stages_was_waited_before_the_last_attempt() -> None:
    stages = ((Stage.STOP, 1.0), (Stage.REATTEMPT, 2.0), (Stage.STOP, 1.0), (Stage.REATTEMPT, 2.0))
    assert lost(IncidentTimes(100 * S, stages)) == {"decide": 2, "restart": 98}


def test_a_parked_job_is_parked_between_its_notes() -> None:
    stages = (
        (Stage.STOP, 1.0),
        (Stage.DECIDE, 1.0),
        (Stage.PARKED, 60.0),
        (Stage.REATTEMPT, 3.0),
        (Stage.CONFIRM, 4.0),
    )
    times = IncidentTimes(100 * S, stages, parked=((120 * S, 180 * S),))
    parked = Interval(120 * S, 180 * S, "parked", ID)
    # No stage covers the 18 s before it. They were spent on repeated requests for copies.
    assert lost(times, parked) == {"decide": 20, "parked": 60, "restart": 20}
    assert lost(IncidentTimes(100 * S, stages[:4])) == {"decide": 2, "parked": 60, "restart": 38}


def test_an_incident_without_a_report_is_divided_by_its_notes() -> None:
    noted = ((Stage.DECIDE, 105 * S), (Stage.DECIDE, 125 * S), (Stage.RESTORE, 130 * S))
    assert lost(IncidentTimes(102 * S, noted=noted)) == {"detect": 2, "decide": 3, "restart": 25, "unknown": 70}


@pytest.mark.parametrize(
    ("noted", "parked_now", "after"),
    [
        ((), None, {"decide": 198}),
        (((Stage.DECIDE, 110 * S),), None, {"decide": 8, "unknown": 190}),
        (((Stage.DECIDE, 110 * S),), True, {"decide": 8, "parked": 190}),
        (((Stage.DECIDE, 110 * S),), False, {"decide": 8, "restart": 190}),
        (((Stage.EVICT, 110 * S),), False, {"evict": 8, "decide": 190}),
    ],
)
def test_an_open_incident(noted: tuple[tuple[str, int], ...], parked_now: bool | None, after: dict[str, float]) -> None:
    times = IncidentTimes(102 * S, noted=noted, parked_now=parked_now)
    assert lost(times, end=None) == {"detect": 2} | after


def test_time_without_notes_is_unknown() -> None:
    assert lost(None) == {"unknown": 100}
    assert lost(IncidentTimes(None, ((Stage.STOP, 1.0),))) == {"unknown": 100}


def test_launches_and_silence_beside_incidents() -> None:
    spans = [
        Interval(0, 10 * S, "launch", START),
        Interval(3 * S, 10 * S, "launch", "a launch"),
        Interval(20 * S, 25 * S, "launch", "a launch"),
        Interval(30 * S, None, "recovery", QUIET),
    ]
    causes = time_lost(spans, {}, begin_ns=0, end_ns=37 * S)
    assert {cause: seconds for cause, seconds in causes.items() if seconds} == {
        "productive": 15,
        "restart": 5,
        "start": 10,
        "detect": 7,
    }
