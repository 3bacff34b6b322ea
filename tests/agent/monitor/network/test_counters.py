"""Rates of counters that grow, wrap, are reset, or cannot be read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.monitor.network.counters import Limit, judged, rise, rises, share

ANY = Limit("link_errors", 0, 1)
PER_SECOND = Limit("errors", 10, 1)
PER_HOUR = Limit("symbols", 120, 3600)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=20))
def test_a_counter_that_is_reset_never_counts_for_more_than_it_counted(steps: list[tuple[int, bool]]) -> None:
    """A wrap and a reset look the same: the value falls, and the growth meanwhile is not known."""
    counted, told, value, known = 0, 0.0, 0, None
    was_reset = False
    for grows, reset in steps:
        if reset and value:
            value, was_reset = 0, True
        value += grows
        counted += grows if known is not None else 0
        told += rise(known, value)
        known = value

    assert 0 <= told <= counted
    if not was_reset:
        assert told == counted


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_any_growth_is_told_at_the_look_that_sees_it(grows: list[int]) -> None:
    value, window, told = 0, judged(ANY, None, 0, 0)[1], []
    for number, more in enumerate(grows, start=1):
        value += more
        seen, window = judged(ANY, window, value, number * 30.0)
        told.append(bool(seen))

    assert told == [more > 0 for more in grows]


def test_a_rate_is_that_of_the_time_between_two_looks() -> None:
    _, window = judged(PER_SECOND, None, 1000, 0)

    assert judged(PER_SECOND, window, 1300, 30)[0] == ""
    assert judged(PER_SECOND, window, 1301, 30)[0] == "errors grew by 301 in 30 s"


def test_what_grows_slowly_is_looked_at_for_the_whole_window() -> None:
    _, window = judged(PER_HOUR, None, 0, 0)
    for look in range(1, 61):
        seen, window = judged(PER_HOUR, window, 2 * look, look * 30.0)
        assert seen == ""

    assert judged(PER_HOUR, window, 121, 61 * 30)[0] == "symbols grew by 121 in 1830 s"
    assert judged(PER_HOUR, window, 120, 3600) == ("", [3600, 120])


def test_what_was_told_is_not_told_again() -> None:
    _, window = judged(PER_HOUR, None, 0, 0)
    seen, window = judged(PER_HOUR, window, 500, 30)

    assert seen
    assert judged(PER_HOUR, window, 500, 60)[0] == ""


def test_a_long_time_without_a_look_is_no_fault_by_itself() -> None:
    """While no agent lived, the counter continued to grow at a healthy rate."""
    _, window = judged(PER_HOUR, None, 0, 0)

    assert judged(PER_HOUR, window, 100 * 24, 24 * 3600)[0] == ""


def test_a_counter_that_cannot_be_read_concludes_nothing() -> None:
    assert judged(ANY, [0.0, 5.0], None, 30) == ("", [0.0, 5.0])
    assert judged(ANY, [0.0, 5.0], 3, 30) == ("", [30, 3])


def test_counters_that_belong_together_count_only_where_none_was_reset() -> None:
    assert rises({"sent": 5, "again": 1}, {"sent": 9, "again": 1, "new": 3}) == {"sent": 4, "again": 0}
    assert rises({"sent": 5, "again": 3}, {"sent": 9, "again": 1}) is None


def test_too_few_say_nothing() -> None:
    assert share(5, 9, at_least=10) is None
    assert share(5, 10, at_least=10) == 0.5
    assert share(0, 0, at_least=0) is None
