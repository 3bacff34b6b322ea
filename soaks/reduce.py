"""Searches for fewer episodes of a soak that still lead to a violation. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

Fails = Callable[[Sequence[int]], Awaitable[bool]]
"""Whether a soak of the episodes with these numbers has a violation too."""


async def reduced(numbers: Sequence[int], fails: Fails, *, tries: int) -> list[int]:
    """Return the shortest list of episodes that was found to fail.

    The violation was seen in the last episode, which therefore stays in every list. It is first tried alone, then with
    one episode before it, with two, with four, and so on. From the first list that fails, ever smaller parts are left
    out (delta debugging).

    Args:
        numbers: Numbers of the episodes that led to the violation, in order.
        fails: Runs a soak of some of these episodes.
        tries: Largest number of runs.
    """
    *before, last = numbers
    kept, tried = list(before), 0

    async def fail(earlier: Sequence[int]) -> bool:
        nonlocal tried
        tried += 1
        return await fails([*earlier, last])

    length = 0
    while tried < tries and length < len(before):
        newest = before[len(before) - length :]
        if await fail(newest):
            kept = newest
            break
        length = max(1, length * 2)
    part = max(1, len(kept) // 2)
    while kept and tried < tries:
        start = 0
        while start < len(kept) and tried < tries:
            without = kept[:start] + kept[start + part :]
            if await fail(without):
                kept = without
            else:
                start += part
        if part == 1:
            break
        part = max(1, part // 2)
    return [*kept, last]
