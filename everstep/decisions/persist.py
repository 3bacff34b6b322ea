"""Which coming step is written to disk on all machines, when that goes by time.

Every machine must write the same step, and must know of it before its ranks
have passed it. So a step that is some seconds ahead is asked for. Several
watchers may ask at once: they choose the next multiple of a power of two, so
that mostly they name the same step, and ask for no other one while one is
wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from everstep.checkpoint_policy import CheckpointPolicy

LEAD_S = 3.0
"""How far ahead the step lies: until then the request has reached every machine (ours)."""
LEAST_AHEAD = 2
"""Steps that it lies ahead at least: the coming one may be completed before the request arrives (ours)."""
AGAIN_S = 60.0
"""A watcher that asked for a step asks for no other one within this time, whatever became of it, or within
``disk_every_min`` where that is shorter, seconds (ours)."""
SPEED_OF = 64
"""Looks from which the time of a step is taken (ours)."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What one rank's machine says of its steps and of the disk."""

    rank: int
    completed_steps: int
    disk_ns: int
    """When its newest disk checkpoint was written; 0: there is none."""
    wanted: int
    """Step that was asked for and that is not written yet; -1: none."""


@dataclass(slots=True)
class PersistRule:
    """Asks for a step when the newest disk checkpoint gets too old; one for each generation of a job."""

    policy: CheckpointPolicy
    began_ns: int
    """When the job began; counts while nothing is on disk."""
    _looks: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SPEED_OF))
    _asked_ns: int = 0

    def observe(self, ranks: Sequence[OnDisk], now_ns: int) -> int | None:
        """The step to ask all machines for, or None. Call it often.

        Args:
            ranks: Of one generation, as their machines showed them last.
            now_ns: Time now.
        """
        newest = max((one.completed_steps for one in ranks), default=-1)
        self._looks.append((now_ns, newest))
        if not (self.policy.disk and self.policy.disk_every_min) or newest < 1:
            return None
        wanted = max(one.wanted for one in ranks)
        if wanted > newest:
            # Say it again while some machine does not know; to the others it is nothing new.
            return None if all(one.wanted == wanted for one in ranks) else wanted
        every_ns = round(self.policy.disk_every_min * 60e9)
        newest_ns = max(one.disk_ns for one in ranks) or self.began_ns
        due_ns = max(newest_ns + every_ns, self._asked_ns + min(every_ns, round(AGAIN_S * 1e9)))
        step_s = self._step_s()
        if wanted >= 0 or now_ns < due_ns or step_s is None:
            return None
        self._asked_ns = now_ns
        return coming_step(newest, step_s)

    def _step_s(self) -> float | None:
        """Mean time of a step over the last looks; None before one was completed."""
        (first_ns, first), (last_ns, last) = self._looks[0], self._looks[-1]
        return (last_ns - first_ns) / 1e9 / (last - first) if last > first else None


def coming_step(newest: int, step_s: float) -> int:
    """A step that is at least ``LEAD_S`` and ``LEAST_AHEAD`` steps ahead.

    The first multiple of a power of two: who asks a little earlier or later, or
    measured a slightly different ``step_s``, names the same step more often than not.

    Args:
        newest: Completed steps of the rank that is furthest.
        step_s: Time of a step, seconds.
    """
    ahead = max(ceil(LEAD_S / step_s), LEAST_AHEAD) if step_s > 0 else LEAST_AHEAD
    raster = 1 << (ahead - 1).bit_length()
    return -(-(newest + ahead) // raster) * raster
