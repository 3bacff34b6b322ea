"""Fewer episodes that still lead to a violation: the last one alone, then ever more of those before it. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

Fails = Callable[[Sequence[int]], Awaitable[bool]]
"""Whether a soak of these episodes, by number, is violated too."""


async def reduced(numbers: Sequence[int], fails: Fails, *, tries: int) -> list[int]:
    """The shortest list found of episodes that still fail, the last of them last.

    The last episode is where the violation was seen, so it stays. Most need nothing
    else, so it is tried alone, then with the one before it, and so on in steps that
    double; of the first list that fails ever smaller parts are left out (delta debugging).

    Args:
        numbers: those that led to the violation, in order.
        fails: runs a soak of some of them.
        tries: how many runs at most.
    """
    *before, last = numbers
    kept, tried = list(before), 0

    async def enough(some: Sequence[int]) -> bool:
        nonlocal tried
        tried += 1
        return await fails([*some, last])

    length = 0
    while tried < tries and length < len(before):
        some = before[len(before) - length :]
        if await enough(some):
            kept = some
            break
        length = max(1, length * 2)
    part = max(1, len(kept) // 2)
    while kept and tried < tries:
        start = 0
        while start < len(kept) and tried < tries:
            without = kept[:start] + kept[start + part :]
            if await enough(without):
                kept = without
            else:
                start += part
        if part == 1:
            break
        part = max(1, part // 2)
    return [*kept, last]
