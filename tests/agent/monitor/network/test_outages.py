"""Outages of links are counted once, from the states that were seen and from the counters of drivers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.monitor.network.outages import KEPT, LinkSeen, ended, is_uncounted, number_of, second_ns, with_flaps

UP = LinkSeen(4, 0, False)
DOWN = LinkSeen(4, 1, True)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30))
def test_outages_are_counted_once_however_often_one_looks(steps: list[tuple[bool, bool]]) -> None:
    """A link goes up and down, and only some of its states are seen. No outage is missed or counted twice."""
    is_down, downs, told = False, 0, 0
    before = LinkSeen(4, downs, is_down)
    for change, look in steps:
        if change:
            is_down = not is_down
            downs += is_down
        if look:
            now = LinkSeen(4, downs, is_down)
            told += ended(before, now)
            before = now
    told += ended(before, LinkSeen(4, downs, is_down))

    assert told == downs - is_down


def test_an_outage_that_the_driver_does_not_count_is_counted_where_it_is_seen() -> None:
    off = LinkSeen(4, 0, True)

    assert ended(UP, off) == 0
    assert ended(off, UP) == 1


@pytest.mark.parametrize("looks_down", [1, 2, 3])
def test_an_outage_that_is_counted_late_is_one(looks_down: int) -> None:
    """Some drivers count an outage only when the link is up again. If such an outage were counted twice, its machine
    could be removed from the job."""
    before, told = UP, 0
    for now in [LinkSeen(4, 0, True)] * looks_down + [LinkSeen(4, 1, False), LinkSeen(4, 1, False)]:
        told += ended(before, now)
        before = replace(now, uncounted=is_uncounted(before, now))

    assert told == 1
    assert not before.uncounted
    assert ended(before, LinkSeen(4, 2, False)) == 1, "the next outage is counted"


def test_what_is_counted_beside_the_outage_that_was_seen_counts() -> None:
    off = LinkSeen(4, 0, True, is_uncounted(UP, LinkSeen(4, 0, True)))

    assert off.uncounted
    assert ended(off, LinkSeen(4, 3, False)) == 3
    counted = LinkSeen(4, 1, True)
    assert not is_uncounted(UP, counted) and not is_uncounted(off, counted)
    assert not is_uncounted(counted, counted), "the driver had already counted this outage"


def test_an_interface_that_was_made_anew_was_away() -> None:
    assert ended(UP, LinkSeen(9, 0, False)) == 1
    assert ended(DOWN, LinkSeen(9, 3, False)) == 1
    assert ended(UP, LinkSeen(9, 0, True)) == 0


def test_a_counter_that_falls_is_no_outage() -> None:
    assert ended(LinkSeen(4, 7, False), UP) == 0


@given(st.lists(st.integers(0, 5), max_size=3 * KEPT))
def test_flaps_that_count_are_all_told_in_bounded_room(numbers: list[int]) -> None:
    times: list[list[int]] = []
    for second, number in enumerate(numbers):
        times = with_flaps(times, second * 10**9, number, lasts_s=3600)

    assert number_of(times) == sum(numbers)
    assert len(times) <= KEPT


def test_a_flap_counts_for_its_time() -> None:
    times = with_flaps([], 0, 2, lasts_s=300)

    assert with_flaps(times, 299 * 10**9, 1, lasts_s=300) == [[0, 2], [299 * 10**9, 1]]
    assert with_flaps(times, 300 * 10**9, 0, lasts_s=300) == []


def test_when_the_second_flap_came() -> None:
    assert second_ns([]) is None
    assert second_ns([[5, 1]]) is None
    assert second_ns([[5, 2], [9, 1]]) == 5
    assert second_ns([[5, 1], [9, 4]]) == 9
