"""The CPU time that a rank computes in a step, against its own past.

A rank that waits for other ranks sleeps. So the time on a CPU, plus the time in which the rank was ready to run without
a CPU, is its own computing, however long it waits. If a rank waits by polling, as with GPUs, this time is the whole
step on all ranks, and shows nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

KEPT = 32
"""The number of earlier times that the newest time is compared with."""
KNOWN = 3
"""The number of earlier times below which no comparison is made."""


class CpuPerStep(NamedTuple):
    """The time of a rank's main thread for each step, in seconds."""

    had_s: float
    """The time in which the rank had a CPU."""
    waited_s: float
    """The time in which the rank was ready to run without a CPU: others had it, or its share was used up."""
    step_s: float = 0.0
    """The duration of the same steps; 0: not known."""

    @property
    def busy_s(self) -> float:
        """Return how long the rank computes: with a CPU, or waiting for a CPU."""
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
        """Add a sample of the rank, for each sample of its pace.

        Args:
            steps: The steps that the rank has completed.
            had_s: How long the rank had a CPU since it began.
            waited_s: How long the rank was ready to run without a CPU.
            step_s: The duration of its steps since the last sample.
            slower: The rank steps more slowly than before.
        """
        last, self._last = self._last, (steps, had_s, waited_s)
        if last is None or steps <= last[0]:
            return
        count = steps - last[0]
        self.newest = CpuPerStep(max(had_s - last[1], 0.0) / count, max(waited_s - last[2], 0.0) / count, step_s)
        if not slower:
            self._past.append(self.newest)
