"""The time that a rank computes in each step, compared with its own past.

A rank that waits for other ranks sleeps. So its computing is the time in which it has a CPU, plus the time in which it
is ready to run and has no CPU. If ranks wait by polling, as with GPUs, that time is the complete step on all ranks, and
shows nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from everstep.decisions.blame.slow.own_past import CpuPerStep

KEPT = 32
"""The number of earlier times with which the newest time is compared."""
KNOWN = 3
"""The number of earlier times that a comparison needs."""


@dataclass(slots=True)
class CpuWatch:
    """The CPU times of one rank, also of the next generations of its job."""

    newest: CpuPerStep | None = None
    """The time of the last steps; None: not known."""
    _last: tuple[int, float, float] | None = None
    """The last sample: steps, time with a CPU, and time ready to run."""
    _past: deque[CpuPerStep] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def typical(self) -> CpuPerStep | None:
        """The median of the times while the rank was not slow; None: not known yet."""
        if len(self._past) < KNOWN:
            return None
        return CpuPerStep(median(past.had_s for past in self._past), median(past.waited_s for past in self._past))

    def begin(self) -> None:
        """Begin a new generation, in which the rank is another process."""
        self.newest = self._last = None

    def observe(self, steps: int, had_s: float, waited_s: float, *, step_s: float, slower: bool) -> None:
        """Add a sample of the rank, for each sample of its pace.

        Args:
            steps: The number of steps that the rank has completed.
            had_s: How long the rank had a CPU since its process began, seconds.
            waited_s: How long the rank was ready to run and had no CPU, seconds.
            step_s: The duration of a step since the last sample, seconds.
            slower: The steps of the rank are slower than before.
        """
        last, self._last = self._last, (steps, had_s, waited_s)
        if last is None or steps <= last[0]:
            return
        count = steps - last[0]
        self.newest = CpuPerStep(max(had_s - last[1], 0.0) / count, max(waited_s - last[2], 0.0) / count, step_s)
        if not slower:
            self._past.append(self.newest)
