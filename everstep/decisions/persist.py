"""Which coming step is written to disk on all machines, when that goes by time.

Every machine must write the same step, and must know of it before its ranks
have passed it. So a step that is some seconds ahead is asked for. Several
watchers may ask at once: they choose the next multiple of a power of two, so
that mostly they name the same step, and ask for no other one while one is
wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.checkpoint_policy import CheckpointPolicy
from everstep.decisions.pace import Pace, steps_ahead

LEAD_S = 3.0
"""How far ahead the step lies: until then the request has reached every machine (ours)."""
AGAIN_S = 60.0
"""A watcher that asked for a step asks for no other one within this time, whatever became of it, or within
``disk_every_min`` where that is shorter, seconds (ours)."""


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
    _pace: Pace = field(default_factory=Pace)
    _asked_ns: int = 0

    def observe(self, ranks: Sequence[OnDisk], now_ns: int) -> int | None:
        """The step to ask all machines for, or None. Call it often.

        Args:
            ranks: Of one generation, as their machines showed them last.
            now_ns: Time now.
        """
        newest = max((one.completed_steps for one in ranks), default=-1)
        self._pace.look(now_ns, newest)
        if not (self.policy.disk and self.policy.disk_every_min) or newest < 1:
            return None
        wanted = max(one.wanted for one in ranks)
        if wanted > newest:
            # Say it again while some machine does not know; to the others it is nothing new.
            return None if all(one.wanted == wanted for one in ranks) else wanted
        every_ns = round(self.policy.disk_every_min * 60e9)
        newest_ns = max(one.disk_ns for one in ranks) or self.began_ns
        due_ns = max(newest_ns + every_ns, self._asked_ns + min(every_ns, round(AGAIN_S * 1e9)))
        step_s = self._pace.step_s()
        if wanted >= 0 or now_ns < due_ns or step_s is None:
            return None
        self._asked_ns = now_ns
        return coming_step(newest, step_s)


def coming_step(newest: int, step_s: float) -> int:
    """A step that is at least ``LEAD_S`` and two steps ahead.

    The first multiple of a power of two: who asks a little earlier or later, or
    measured a slightly different ``step_s``, names the same step more often than not.

    Args:
        newest: Completed steps of the rank that is furthest.
        step_s: Time of a step, seconds.
    """
    ahead = steps_ahead(LEAD_S, step_s)
    raster = 1 << (ahead - 1).bit_length()
    return -(-(newest + ahead) // raster) * raster
