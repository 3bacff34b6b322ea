"""A reduced list of episodes still fails, and no episode can be removed from it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from soaks.reduce import reduced


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n), max_size=4))))
def test_it_finds_the_episodes_that_are_needed(drawn: tuple[int, set[int]]) -> None:
    count, needed = drawn
    needed |= {count}
    runs: list[list[int]] = []

    async def fails(some: Sequence[int]) -> bool:
        runs.append(list(some))
        return needed <= set(some)

    found = asyncio.run(reduced(range(1, count + 1), fails, tries=1000))
    assert found == sorted(needed)
    assert all(run == sorted(run) and run[-1] == count for run in runs)


@given(st.integers(1, 40), st.integers(0, 6), st.integers(1, 40))
def test_it_tries_no_more_than_it_may_and_what_it_returns_was_seen_to_fail(count: int, tries: int, first: int) -> None:
    runs: list[list[int]] = []

    async def fails(some: Sequence[int]) -> bool:
        runs.append(list(some))
        return min(first, count) in some

    found = asyncio.run(reduced(range(1, count + 1), fails, tries=tries))
    assert len(runs) <= tries
    assert found == list(range(1, count + 1)) or found in runs
    assert min(first, count) in found


def test_a_violation_that_does_not_come_again_keeps_its_whole_list() -> None:
    async def fails(some: Sequence[int]) -> bool:
        return False

    assert asyncio.run(reduced([3, 5, 9], fails, tries=50)) == [3, 5, 9]
