"""How often a link was down between two looks, from what each saw: pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KEPT = 32
"""Times of flaps of one link that are kept apart; older ones are put together."""


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """The state of a link at one inspection."""

    index: int
    """Another one: it was made anew, and its counter with it."""
    downs: int
    """How often it went down, as the kernel counted."""
    is_down: bool
    """Or is not there at all."""
    uncounted: bool = False
    """It is down, and the kernel has not counted that yet."""


def ended(before: LinkSeen, now: LinkSeen) -> int:
    """How many outages ended between two looks, short ones that neither look saw as well.

    Some drivers count no outage where an administrator switches the link off, or count it late; one that a look sees
    counts then, and once.
    """
    if now.index != before.index:
        return int(not now.is_down)  # it was away meanwhile
    begun = max(_counted(before, now), int(now.is_down and not before.is_down))
    return before.is_down + begun - now.is_down


def is_uncounted(before: LinkSeen, now: LinkSeen) -> bool:
    """Whether the outage that the later look sees was not counted: if it is, by a later one, it is the same."""
    if not now.is_down or now.index != before.index:
        return False
    return now.downs <= before.downs and (before.uncounted or not before.is_down)


def _counted(before: LinkSeen, now: LinkSeen) -> int:
    """Outages that the kernel counted between two looks, but for the one that the earlier look saw."""
    return max(now.downs - before.downs - before.uncounted, 0)


def with_flaps(times: list[list[int]], now_ns: int, flaps: int, lasts_s: float) -> list[list[int]]:
    """The flaps that count now: pairs of time and number, the newest last.

    Args:
        times: What was returned earlier.
        now_ns: By a clock that is not set.
        flaps: Those that ended now.
        lasts_s: How long one counts.
    """
    counting = [[at_ns, number] for at_ns, number in times if now_ns - at_ns < lasts_s * 1e9]
    if flaps:
        counting.append([now_ns, flaps])
    if len(counting) > KEPT:
        (_, first), (at_ns, second), *rest = counting
        counting = [[at_ns, first + second], *rest]
    return counting


def number_of(times: Iterable[list[int]]) -> int:
    """Return the number of these flaps."""
    return sum(number for _, number in times)


def second_ns(times: Iterable[list[int]]) -> int | None:
    """When the second of these flaps came; None where there are fewer."""
    number = 0
    for at_ns, flaps in times:
        number += flaps
        if number >= 2:
            return at_ns
    return None
