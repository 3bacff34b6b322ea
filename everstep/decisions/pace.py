"""How long a step takes, from looks at how many are completed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

SPEED_OF = 64
"""Looks from which the time of a step is taken (ours)."""
LEAST_AHEAD = 2
"""Steps that a step that is asked for lies ahead at least: the coming one may be completed before the request
arrives (ours)."""


@dataclass(slots=True)
class Pace:
    """Of one generation of a job."""

    _looks: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SPEED_OF))

    def look(self, now_ns: int, newest: int) -> None:
        """So many steps are completed by whoever is furthest; negative: nobody knows yet."""
        if newest >= 0:
            self._looks.append((now_ns, newest))

    def step_s(self) -> float | None:
        """Mean time of a step over the last looks; None before one was completed."""
        if not self._looks:
            return None
        (first_ns, first), (last_ns, last) = self._looks[0], self._looks[-1]
        return (last_ns - first_ns) / 1e9 / (last - first) if last > first else None


def steps_ahead(lead_s: float, step_s: float) -> int:
    """How many steps take ``lead_s`` seconds when each takes ``step_s``, and ``LEAST_AHEAD`` at least."""
    return max(ceil(lead_s / step_s), LEAST_AHEAD) if step_s > 0 else LEAST_AHEAD
