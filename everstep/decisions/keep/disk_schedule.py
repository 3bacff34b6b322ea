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

from everstep.decisions.keep.step_rate import StepRate, steps_ahead
from everstep.model.checkpoint_policy import CheckpointPolicy

LEAD_S = 3.0
"""How far ahead the step lies: until then the request has reached every machine."""
AGAIN_S = 60.0
"""A watcher that asked for a step asks for the next one after this time at the soonest, seconds, and after twice as
long each time that no step came of it, up to ``disk_every_min``."""
MISSED_MIN = 15.0
"""Where steps are due by their number only, one is asked for when so long no new one got onto all disks, minutes."""


@dataclass(frozen=True, slots=True)
class DiskProgress:
    """What one rank's machine says of its steps and of the disk; ages by that machine's own clock."""

    rank: int
    completed_steps: int
    disk_step: int
    """Its newest disk checkpoint; -1: there is none."""
    disk_age_s: float
    """How old the state in it is now."""
    lived_s: float
    """How long ago this process of the rank was started; counts while nothing is on disk."""
    wanted: int
    """Step that was asked for and that is not written yet; -1: none."""


@dataclass(slots=True)
class PersistRule:
    """Asks for a step when the newest one that all ranks have on disk gets too old; one for each generation of a job.

    Its time is the watcher's alone, from when it saw that a step had got onto
    all disks. What a machine's clock says counts as a difference only, of two
    of its own times.
    """

    policy: CheckpointPolicy
    _pace: StepRate = field(default_factory=StepRate)
    _complete_step: int | None = None
    """The newest step that all ranks have; None: not known yet."""
    _saved_ns: int | None = None
    """When that one was saved, or the job began; None: not known yet."""
    _asked_ns: int | None = None
    _asked: int = 0
    """How often, since the newest step got onto all disks."""

    def next(self) -> PersistRule:
        """The rule of the next generation."""
        return PersistRule(self.policy, _saved_ns=self._saved_ns, _asked_ns=self._asked_ns, _asked=self._asked)

    def observe(self, ranks: Sequence[DiskProgress], complete_step: int, now_ns: int) -> int | None:
        """The step to ask all machines for, or None. Call it often.

        Args:
            ranks: All of one generation, as their machines showed them last.
            complete_step: The newest step that all of them have on disk; 0: there is none.
            now_ns: Time now, on a clock that is never set.
        """
        newest = max((rank.completed_steps for rank in ranks), default=-1)
        self._pace.look(now_ns, newest)
        every_ns = round(self._every_min(newest, complete_step) * 60e9)
        if not ranks or not every_ns or newest < 1:
            return None
        self._look(ranks, complete_step, now_ns)
        wanted = max(rank.wanted for rank in ranks)
        if wanted > newest:
            # Say it again while some machine does not know; to the others it is nothing new.
            return None if all(rank.wanted == wanted for rank in ranks) else wanted
        step_s = self._pace.step_s()
        if wanted >= 0 or step_s is None or now_ns < self._due_ns(every_ns):
            return None
        self._asked_ns = now_ns
        self._asked += 1
        every = 0 if self.policy.disk_every_min else self.policy.disk_every_steps
        return coming_step(newest, step_s, every=every)

    def _every_min(self, newest: int, complete_step: int) -> float:
        """How old the newest step on all disks may get, minutes; 0: nothing is asked for."""
        every = self.policy.disk_every_steps
        if not self.policy.disk or self.policy.disk_every_min:
            return self.policy.disk_every_min if self.policy.disk else 0.0
        return MISSED_MIN if every and newest - complete_step >= 2 * every else 0.0

    def _look(self, ranks: Sequence[DiskProgress], complete_step: int, now_ns: int) -> None:
        """Notice that a later step got onto all disks."""
        later = complete_step > self._complete_step if self._complete_step is not None else self._saved_ns is None
        if later:
            # A rank that has later steps too speaks of those: the oldest says most.
            age_s = max(rank.disk_age_s if complete_step else rank.lived_s for rank in ranks)
            self._saved_ns = now_ns - round(max(age_s, 0.0) * 1e9)
            self._asked = 0
        if later or self._complete_step is None:
            self._complete_step = complete_step

    def _due_ns(self, every_ns: int) -> int:
        assert self._saved_ns is not None
        due_ns = self._saved_ns + every_ns
        if self._asked_ns is None:
            return due_ns
        again_ns = round(AGAIN_S * 1e9) << min(max(self._asked - 1, 0), 20)
        return max(due_ns, self._asked_ns + min(every_ns, again_ns))


def coming_step(newest: int, step_s: float, *, every: int = 0) -> int:
    """A step that is at least ``LEAD_S`` and two steps ahead.

    The first multiple of a power of two: who asks a little earlier or later, or
    measured a slightly different ``step_s``, names the same step more often than not.

    Args:
        newest: Completed steps of the rank that is furthest.
        step_s: Time of a step, seconds.
        every: Only multiples of this are written to disk; 0: any step may be.
    """
    ahead = steps_ahead(LEAD_S, step_s)
    raster = every or 1 << (ahead - 1).bit_length()
    return -(-(newest + ahead) // raster) * raster
