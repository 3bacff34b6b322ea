"""How long a rank computes in a step, on a CPU, against its own past.

Whoever waits for others sleeps; so that time on a CPU, with the time in which it could have run and had none, is its
own computing, however long the others keep it waiting. Where it waits by looking around for ever, as with GPUs,
it is all of the step, on all ranks alike, and says nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

KEPT = 32
"""Earlier times that the newest one is compared with."""
KNOWN = 3
"""Before there are so many of them there is nothing to compare with."""


class CpuPerStep(NamedTuple):
    """The time of a rank's main thread for each step, in seconds."""

    had_s: float
    """That it had a CPU."""
    waited_s: float
    """That it could have run and had none: others had it, or it had used up its share."""
    step_s: float = 0.0
    """How long the same steps took; 0: not known."""

    @property
    def busy_s(self) -> float:
        """How long the rank computes: with a CPU, or waiting for a CPU."""
        return self.had_s + self.waited_s


@dataclass(slots=True)
class CpuWatch:
    """The CPU times of one rank. The job's next generation keeps the same watch."""

    newest: CpuPerStep | None = None
    """Over the last steps; None: not known."""
    _last: tuple[int, float, float] | None = None
    """Steps, and what it had used by then."""
    _past: deque[CpuPerStep] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def typical(self) -> CpuPerStep | None:
        """Median while it was not slower than before; None: not known yet."""
        if len(self._past) < KNOWN:
            return None
        return CpuPerStep(median(pace.had_s for pace in self._past), median(pace.waited_s for pace in self._past))

    def begin(self) -> None:
        """Another generation, and another process."""
        self.newest = self._last = None

    def observe(self, steps: int, had_s: float, waited_s: float, *, step_s: float, slower: bool) -> None:
        """Look at it, once for each look at its pace.

        Args:
            steps: That it has completed.
            had_s: How long it had a CPU since it began.
            waited_s: How long it could have run and had none.
            step_s: How long its steps took since the last look.
            slower: It steps more slowly than it did.
        """
        last, self._last = self._last, (steps, had_s, waited_s)
        if last is None or steps <= last[0]:
            return
        count = steps - last[0]
        self.newest = CpuPerStep(max(had_s - last[1], 0.0) / count, max(waited_s - last[2], 0.0) / count, step_s)
        if not slower:
            self._past.append(self.newest)
