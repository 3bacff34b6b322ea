"""What is known from earlier looks: laws of counters, over restarts of the agent."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as some

from agent.monitor.gpu.rules.rule import GpuKnown

COUNTS = some.lists(some.one_of(some.none(), some.integers(min_value=0, max_value=2**64 - 1)), max_size=12)


def restarted(known: GpuKnown) -> GpuKnown:
    kept: dict[str, Any] = json.loads(json.dumps(known.kept()))
    return GpuKnown(kept)


@settings(max_examples=60)
@given(COUNTS)
def test_a_counter_rises_by_what_it_rose_since_the_last_look_that_saw_it(counts: list[int | None]) -> None:
    known, last = GpuKnown({}), None
    for count in counts:
        known = restarted(known)
        back = known.went_back("x", count)
        rose = known.rose("x", count)
        if count is None or last is None or count < last:
            assert rose is None
        else:
            assert rose == count - last
        assert back == (count is not None and last is not None and count < last)
        last = last if count is None else count


@settings(max_examples=60)
@given(some.lists(some.one_of(some.none(), some.booleans()), max_size=12))
def test_looks_in_a_row(seen: list[bool | None]) -> None:
    """Looks without a value neither end a row nor make it longer."""
    known = GpuKnown({})
    for number, so in enumerate(seen):
        known = restarted(known)
        told = [one for one in seen[: number + 1] if one is not None]
        expected = 0
        while told and told.pop():
            expected += 1
        assert known.in_a_row("x", so) == expected


@given(some.lists(some.sets(some.integers(0, 17)), max_size=6))
@settings(max_examples=30)
def test_a_link_that_was_up_is_remembered(looks: list[set[int]]) -> None:
    known, ever = GpuKnown({}), set[int]()
    for up in looks:
        known = restarted(known)
        ever |= up
        assert known.links_up(up) == ever
