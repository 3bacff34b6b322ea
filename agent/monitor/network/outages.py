"""This module counts the outages of a link from two inspections and from the kernel's counter of outages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KEPT = 32
"""Largest number of entries for the flaps of one link. If there are more, the two oldest entries are merged."""


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """The state of a link at one inspection."""

    index: int
    """The kernel's index of the interface; another index means that it was created anew, with a new counter."""
    downs: int
    """Number of outages that the kernel has counted."""
    is_down: bool
    """Whether the link is down or the interface does not exist."""
    uncounted: bool = False
    """Whether the link is down and the kernel has not counted that outage yet."""


def ended(before: LinkSeen, now: LinkSeen) -> int:
    """Return how many outages ended between two inspections, including short ones that only the kernel counted.

    Some drivers do not count an outage that an administrator causes, or count it late. An outage that an inspection
    sees is therefore counted exactly once, whether the driver counts it or not.
    """
    if now.index != before.index:
        return int(not now.is_down)  # it did not exist for some time
    begun = max(_counted(before, now), int(now.is_down and not before.is_down))
    return before.is_down + begun - now.is_down


def is_uncounted(before: LinkSeen, now: LinkSeen) -> bool:
    """Return whether the kernel has not counted the current outage yet. It may count this same outage later."""
    if not now.is_down or now.index != before.index:
        return False
    return now.downs <= before.downs and (before.uncounted or not before.is_down)


def _counted(before: LinkSeen, now: LinkSeen) -> int:
    """Return how many new outages the kernel counted. An outage that the earlier inspection saw is not new."""
    return max(now.downs - before.downs - before.uncounted, 0)


def with_flaps(times: list[list[int]], now_ns: int, flaps: int, lasts_s: float) -> list[list[int]]:
    """Return the recent flaps, as pairs of time and number, the newest last.

    Args:
        times: The result of the previous call.
        now_ns: Nanoseconds of the monotonic clock.
        flaps: Number of outages that ended now.
        lasts_s: How long a flap is recent, seconds.
    """
    recent = [[at_ns, number] for at_ns, number in times if now_ns - at_ns < lasts_s * 1e9]
    if flaps:
        recent.append([now_ns, flaps])
    if len(recent) > KEPT:
        (_, first), (at_ns, second), *rest = recent
        recent = [[at_ns, first + second], *rest]
    return recent


def number_of(times: Iterable[list[int]]) -> int:
    """Return the number of these flaps."""
    return sum(number for _, number in times)


def second_ns(times: Iterable[list[int]]) -> int | None:
    """Return when the second of these flaps happened; None: there are fewer than two."""
    number = 0
    for at_ns, flaps in times:
        number += flaps
        if number >= 2:
            return at_ns
    return None
