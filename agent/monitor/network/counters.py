"""What counters say that only grow, until they are reset: pure.

A counter that is smaller than before was reset or wrapped round; what it counted meanwhile is not known, and nothing is
concluded of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """How fast a counter may grow."""

    counter: str
    more_than: float
    """By more than this within …"""
    within_s: float
    """… this many seconds it grows too fast."""


def rise(before: float | None, now: float | None) -> float:
    """By how much a counter grew; 0 where that is not known."""
    if before is None or now is None or now < before:
        return 0.0
    return now - before


def judged(
    limit: Limit, before: list[float] | None, value: float | None, now_s: float
) -> tuple[str, list[float] | None]:
    """Whether a counter grows too fast.

    What it grows by is looked at over ``within_s``, or from one look to the next where these are farther apart. A
    window that was reported, or is over, is followed by a new window.

    Args:
        limit: How fast it may grow.
        before: What was returned earlier: when the window began, and what the counter was; None: nothing yet.
        value: What it is now; None: it cannot be read.
        now_s: By a clock that is not set.

    Returns:
        What was seen, empty where it is well; and what the next call needs.
    """
    if value is None:
        return "", before
    if before is None or value < before[1] or now_s < before[0]:
        return "", [now_s, value]
    elapsed_s, grown = now_s - before[0], value - before[1]
    if grown > limit.more_than * max(1.0, elapsed_s / limit.within_s):
        return f"{limit.counter} grew by {grown:.0f} in {elapsed_s:.0f} s", [now_s, value]
    return "", [now_s, value] if elapsed_s >= limit.within_s else before


def share(part: float, whole: float, at_least: float) -> float | None:
    """Which share of all it is; None where there were too few to say."""
    return part / whole if whole >= max(at_least, 1.0) else None


def rises(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float] | None:
    """By how much each counter grew; None where one was reset, for then none of them is known together."""
    if any(now[name] < value for name, value in before.items() if name in now):
        return None
    return {name: value - before[name] for name, value in now.items() if name in before}
