"""How long a step takes, from looks at how many are completed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

SPEED_OF = 64
"""Looks from which the time of a step is taken."""
LEAST_AHEAD = 2
"""Steps that a step that is asked for lies ahead at least: the coming one may be completed before the request
arrives."""


@dataclass(slots=True)
class StepRate:
    """Of one generation of a job."""

    _looks: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SPEED_OF))

    _came_ns: int = 0
    """When the newest step was seen first; 0: none was."""
    _took_ns: int = 0
    """The step before it, or the mean of those that came with it."""

    def look(self, now_ns: int, newest: int) -> None:
        """Note how many steps the furthest rank has completed; negative: not known yet."""
        if newest < 0:
            return
        last = self._looks[-1][1] if self._looks else -1
        if newest > last:
            self._took_ns = (now_ns - self._came_ns) // (newest - last) if self._came_ns else 0
            self._came_ns = now_ns
        self._looks.append((now_ns, newest))

    def stands_still(self, now_ns: int, least_s: float, steps: int) -> bool:
        """Whether the next step takes longer than ``least_s`` seconds, and longer than so many steps took lately."""
        return bool(self._came_ns) and now_ns - self._came_ns > max(least_s * 1e9, steps * self._took_ns)

    def step_s(self) -> float | None:
        """Mean time of a step over the last looks; None before one was completed."""
        if not self._looks:
            return None
        (first_ns, first), (last_ns, last) = self._looks[0], self._looks[-1]
        return (last_ns - first_ns) / 1e9 / (last - first) if last > first else None


def steps_ahead(lead_s: float, step_s: float) -> int:
    """How many steps take ``lead_s`` seconds when each takes ``step_s``, and ``LEAST_AHEAD`` at least."""
    return max(ceil(lead_s / step_s), LEAST_AHEAD) if step_s > 0 else LEAST_AHEAD
