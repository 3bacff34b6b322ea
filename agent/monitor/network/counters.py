"""This module compares two readings of counters, which only grow until they are reset.

A counter that is smaller than before was reset, or it overflowed. What it counted meanwhile is not known, so it is
never reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest permitted growth of a counter."""

    counter: str
    more_than: float
    """Growth within ``within_s`` above which the counter grows too fast."""
    within_s: float


def rise(before: float | None, now: float | None) -> float:
    """Return by how much a counter grew; 0 if that is not known."""
    if before is None or now is None or now < before:
        return 0.0
    return now - before


def judged(
    limit: Limit, before: list[float] | None, value: float | None, now_s: float
) -> tuple[str, list[float] | None]:
    """Decide whether a counter grows too fast.

    Growth is measured over windows of ``within_s``, or of the time between two inspections if that is longer. A new
    window begins when a window is over and when growth is reported.

    Args:
        limit: The largest permitted growth.
        before: The window that the previous call returned: when it began, and the counter then; None: first call.
        value: The counter now; None: it cannot be read.
        now_s: Seconds of the monotonic clock.

    Returns:
        A description of the growth, empty if it is permitted; and the window for the next call.
    """
    if value is None:
        return "", before
    if before is None or value < before[1] or now_s < before[0]:
        return "", [now_s, value]
    elapsed_s, grown = now_s - before[0], value - before[1]
    if grown > limit.more_than * max(1.0, elapsed_s / limit.within_s):
        return f"{limit.counter} grew by {grown:.0f} in {elapsed_s:.0f} s", [now_s, value]
    return "", [now_s, value] if elapsed_s >= limit.within_s else before


def share(part: float, total: float, at_least: float) -> float | None:
    """Return the share of a part in a total; None if the total is less than ``at_least``."""
    return part / total if total >= max(at_least, 1.0) else None


def rises(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float] | None:
    """Return by how much each counter grew; None if one was reset, since only all of them together can be compared."""
    if any(now[name] < value for name, value in before.items() if name in now):
        return None
    return {name: value - before[name] for name, value in now.items() if name in before}
