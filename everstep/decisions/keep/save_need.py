"""Measures after how many steps one rank can save without a wait: a save has to end before the next one begins.

The distance between saves is a power of two, so that after a change to fewer saves the rank still saves only steps that
it would have saved before. It rises after a few slow saves, since each of them delays training. It falls only after
many saves that would easily have ended in less time, since more saves are less urgent, and a change costs some waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

STEPS = 9
"""The time of a step is the median of this many steps."""
SLOW_SAVES = 3
"""The distance rises when this many saves in a row took longer than it."""
FAST_SAVES = 16
"""The distance falls when each of this many saves in a row would have ended well within a smaller one."""
ROOM = 1.5
"""A save ends well within a distance if it would do so even if it took longer by this factor."""


@dataclass(slots=True)
class SaveNeed:
    """The distance between saves that one rank needs.

    Args:
        wanted: The distance with which the rank begins, in steps.
    """

    wanted: int = 1
    """The distance between saves that the rank needs, in steps."""
    save_s: float = 0.0
    """Time of the last save, from its begin to its commit, seconds; 0: not known yet."""
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _needed: deque[int] = field(default_factory=lambda: deque(maxlen=SLOW_SAVES))
    _ample: deque[int] = field(default_factory=lambda: deque(maxlen=FAST_SAVES))
    """The distances within which the last saves ended, and within which they ended well."""

    @property
    def step_s(self) -> float:
        """Time of a step without saves and without waits for them, seconds; 0: not known yet."""
        return median(self._steps) if self._steps else 0.0

    def observe_step(self, step_s: float) -> None:
        """Note the time of a step, without the time that training waited for saves, seconds."""
        self._steps.append(step_s)

    def observe_save(self, save_s: float) -> None:
        """Note the time of a save, from its begin to its commit, seconds."""
        self.save_s = save_s
        if not self.step_s:
            return
        self._needed.append(distance(save_s, self.step_s))
        self._ample.append(distance(ROOM * save_s, self.step_s))
        if len(self._needed) == SLOW_SAVES and min(self._needed) > self.wanted:
            self.wanted = min(self._needed)
        elif len(self._ample) == FAST_SAVES and max(self._ample) < self.wanted:
            self.wanted = max(self._ample)


def distance(save_s: float, step_s: float) -> int:
    """Return the smallest power of two of steps, at most 2 ** 20, that take as long as a save.

    Args:
        save_s: Time of a save, seconds.
        step_s: Time of a step, seconds; above 0.
    """
    steps = 1
    while steps * step_s < save_s and steps < 1 << 20:
        steps *= 2
    return steps
