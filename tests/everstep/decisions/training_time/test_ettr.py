"""ETTR is equal to a count of single seconds, and has its laws."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.training_time.ettr import KINDS, Interval, Launch, Outage, ettr, unproductive

S = 10**9
TIMES = st.integers(-5, 45)


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    start = draw(TIMES)
    end = draw(st.none() | st.integers(start, 50))
    return Interval(start * S, None if end is None else end * S, draw(st.sampled_from(KINDS)))


@given(st.lists(intervals(), max_size=8), st.integers(0, 40), st.none() | st.integers(1, 60))
def test_ettr_equals_a_count_of_single_seconds(spans: list[Interval], now: int, window: int | None) -> None:
    found = ettr(spans, start_ns=0, now_ns=now * S, window_s=window)
    begin = 0 if window is None else max(0, now - window)
    counted = dict.fromkeys(KINDS, 0)
    for second in range(begin, now):
        middle = second * S + S // 2
        covering = [i.kind for i in spans if i.start_ns <= middle and (i.end_ns is None or middle < i.end_ns)]
        counted[max(covering, key=KINDS.index, default="productive")] += 1
    assert found.seconds == counted
    assert found.wall_s == now - begin
    assert sum(found.seconds.values()) == found.wall_s


@given(st.lists(intervals(), max_size=8), intervals(), st.integers(1, 40))
def test_one_more_interruption_never_raises_ettr(spans: list[Interval], more: Interval, now: int) -> None:
    before = ettr(spans, start_ns=0, now_ns=now * S).ratio
    after = ettr([*spans, more], start_ns=0, now_ns=now * S).ratio
    assert before is not None
    assert after is not None
    assert 0 <= after <= before <= 1


@given(
    st.permutations(
        [Interval(0, 3 * S, "launch"), Interval(2 * S, 5 * S, "lost steps"), Interval(4 * S, None, "parked")]
    )
)
def test_order_does_not_matter(spans: list[Interval]) -> None:
    assert ettr(spans, start_ns=0, now_ns=10 * S).seconds == {
        "productive": 0,
        "lost steps": 1,
        "launch": 3,
        "recovery": 0,
        "parked": 6,
    }


def test_time_before_the_window_does_not_count() -> None:
    crash = [Interval(0, 1800 * S, "recovery")]
    assert ettr(crash, start_ns=0, now_ns=3600 * S, window_s=3600.0).ratio == 0.5
    assert ettr(crash, start_ns=0, now_ns=5400 * S, window_s=3600.0).ratio == 1.0


def test_without_time_there_is_no_ratio() -> None:
    assert ettr([], start_ns=5, now_ns=5).ratio is None
    assert ettr([Interval(0, None, "launch")], start_ns=5, now_ns=3).wall_s == 0


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Launch], list[Outage]]:
    """Draw the launches and incidents of a job that starts at 0. Some of their ends may be unknown."""
    launches = [
        Launch(begin * S, draw(st.none() | st.integers(begin, 60).map(lambda one: one * S)))
        for begin in sorted(draw(st.sets(st.integers(1, 50), max_size=4)))
    ]
    outages = [
        Outage(f"{begin}", begin * S, draw(st.none() | st.integers(begin, 60).map(lambda one: one * S)))
        for begin in sorted(draw(st.sets(st.integers(1, 50), max_size=4)))
    ]
    return launches, outages


@given(lives(), st.integers(1, 60))
def test_the_parts_sum_up_and_no_interval_outlives_the_step_that_disproves_it(
    life: tuple[list[Launch], list[Outage]], now: int
) -> None:
    launches, outages = life
    spans = unproductive(0, launches, outages)
    found = ettr(spans, start_ns=0, now_ns=now * S)
    assert sum(found.seconds.values()) == found.wall_s == now

    for span in spans:
        later = [one.stepped_ns for one in launches if one.stepped_ns and one.launched_ns >= span.start_ns]
        assert span.end_ns is not None or not later, f"{span} has no end, although a later generation stepped"
        assert all(span.end_ns is not None and span.end_ns <= step for step in later), span
    if not any(one.stepped_ns for one in launches):
        assert found.seconds["productive"] == 0, "without a step no time was productive"


@given(lives())
def test_a_recorded_end_never_lowers_ettr(life: tuple[list[Launch], list[Outage]]) -> None:
    launches, outages = life
    open_ones = [Outage(one.cause, one.start_ns) for one in outages]
    noted, missed = (ettr(unproductive(0, launches, some), start_ns=0, now_ns=60 * S) for some in (outages, open_ones))
    assert noted.seconds["productive"] >= missed.seconds["productive"]


EARLY = st.integers(0, 12)


@given(
    st.lists(st.builds(Launch, EARLY, st.none() | EARLY), max_size=6),
    st.lists(st.builds(Outage, st.just("x"), EARLY, st.none() | EARLY), max_size=6),
)
def test_an_interruption_ends_with_the_first_later_step_of_any_generation(
    launches: list[Launch], outages: list[Outage]
) -> None:
    def end(begin_ns: int, closed_ns: int | None = None) -> int | None:
        steps = [one.stepped_ns for one in launches if one.launched_ns >= begin_ns]
        return min((at for at in [*steps, closed_ns] if at and at >= begin_ns), default=None)

    [start, *found] = unproductive(1, launches, outages)

    assert start.end_ns == min((one.stepped_ns for one in launches if one.stepped_ns), default=None)
    expected = [end(one.launched_ns) for one in launches] + [end(one.start_ns, one.closed_ns) for one in outages]
    assert [one.end_ns for one in found] == expected
