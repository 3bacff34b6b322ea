"""The next step that all machines write to disk by time, and the step on disk that all ranks keep.

Every machine must write the same step, and must know of it before its ranks have passed it. So a step that is some
seconds ahead is asked for. Several watchers may ask at once: they choose the next multiple of a power of two, so that
mostly they name the same step, and ask for no other step while one is wanted.

Disks differ: a slow one gets every 2nd, 4th, … of the steps that a fast one gets, and later. Each machine deletes old
steps, and other machines may just have finished a step that one machine deletes. So a step that all ranks have
is sent to all of them as the step to *keep*. A machine that has it acknowledges that, and does not delete it any more.
When all have acknowledged, it is *settled*, and only then may older steps go, and the next step is named.

So messages may be late, lost or repeated, there may be several watchers, and agents and workers may be restarted: a
conclusion rests on facts that stay true. A machine gives up a step that it keeps only for a later one that is settled,
or because the step is *gone*: some rank has passed it without having it on disk, and so never will.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import ceil

from everstep.model.checkpoint_policy import CheckpointPolicy

SPEED_OF = 64
"""The number of samples from which the time of a step is computed."""
LEAST_AHEAD = 2
"""The smallest number of steps that a requested step lies ahead: the next step may be complete before the request
arrives."""


@dataclass(slots=True)
class StepRate:
    """The speed at which one generation of a job steps."""

    _looks: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SPEED_OF))

    _came_ns: int = 0
    """When the newest step was first seen, nanoseconds; 0: no step was seen."""
    _took_ns: int = 0
    """The time of the newest step, or the mean of the steps that were first seen with it, nanoseconds."""

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
        """Return whether the next step takes longer than ``least_s`` seconds, and longer than ``steps`` steps took
        lately."""
        return bool(self._came_ns) and now_ns - self._came_ns > max(least_s * 1e9, steps * self._took_ns)

    def step_s(self) -> float | None:
        """Return the mean time of a step over the last samples, seconds; None before a step was completed."""
        if not self._looks:
            return None
        (first_ns, first), (last_ns, last) = self._looks[0], self._looks[-1]
        return (last_ns - first_ns) / 1e9 / (last - first) if last > first else None


def steps_ahead(lead_s: float, step_s: float) -> int:
    """Return how many steps take ``lead_s`` seconds when each takes ``step_s``, at least ``LEAST_AHEAD``."""
    return max(ceil(lead_s / step_s), LEAST_AHEAD) if step_s > 0 else LEAST_AHEAD


@dataclass(frozen=True, slots=True)
class StepsOnDisk:
    """The steps on the disk of one rank's machine, as the machine reports them; equal for all ranks of a machine."""

    steps: frozenset[int]
    """Steps that are there for all ranks of the machine."""
    passed: int = 0
    """Every step up to this step is among ``steps`` or never will be; 0: not known."""
    kept: int = 0
    """The step that the machine keeps until it is notified that the step is settled or gone; 0: none."""
    settled: int = 0
    """The newest that it heard to be settled; 0: none."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The message that machines should receive."""

    keep: int = 0
    """The step that every rank should keep; 0: there is none."""
    settled: int = 0
    """The newest step that every rank keeps: older steps may be deleted; 0: none."""
    gone: tuple[int, ...] = ()
    """Steps on some disk that some rank does not have and never will."""


def newest_of_all(ranks: Collection[StepsOnDisk]) -> int:
    """The newest step that all of some ranks have on disk; 0: there is none."""
    return max(frozenset.intersection(*(disk.steps for disk in set(ranks))), default=0) if ranks else 0


def agree(ranks: Sequence[StepsOnDisk], world_size: int) -> Agreed:
    """Return the message for every machine.

    Args:
        ranks: The ranks of one generation, as their machines showed them last.
        world_size: Ranks of the job; while some of them are not known, nothing is concluded.
    """
    if len(ranks) < world_size:
        return Agreed()
    machines = set(ranks)
    held = frozenset.union(*(disk.steps for disk in machines))
    gone = {step for step in held if any(step not in disk.steps and step <= disk.passed for disk in machines)}
    kept = max(disk.kept for disk in machines)
    settled = max(disk.settled for disk in machines)
    if all(disk.kept == kept and kept in disk.steps for disk in machines):
        settled = max(settled, kept)
    if kept <= settled or kept in gone:
        kept = newest_of_all(machines)
    return Agreed(kept, settled, tuple(sorted(gone)))


LEAD_S = 3.0
"""How far ahead the step lies, seconds: within this time the request reaches every machine."""
AGAIN_S = 60.0
"""The shortest time between two requests of one watcher, seconds. It doubles each time that a request leads to no step,
up to ``disk_every_min``."""
MISSED_MIN = 15.0
"""If steps are due by their number only, a step is requested after this many minutes without a new step
on all disks."""


@dataclass(frozen=True, slots=True)
class DiskProgress:
    """The progress of one rank and its disk, as its machine reports it; ages are by that machine's own clock."""

    rank: int
    completed_steps: int
    disk_step: int
    """The rank's newest disk checkpoint; -1: there is none."""
    disk_age_s: float
    """The age of the state in that checkpoint."""
    lived_s: float
    """The age of the rank's current process; it counts while nothing is on disk."""
    wanted: int
    """Step that was asked for and that is not written yet; -1: none."""


@dataclass(slots=True)
class PersistRule:
    """A rule for one generation of a job: request a step when the newest step that all ranks have on disk is too old.

    The rule uses only the watcher's clock, from the moment at which it saw a step on all disks. Of a machine's clock it
    uses only differences between two times of that clock.
    """

    policy: CheckpointPolicy
    _pace: StepRate = field(default_factory=StepRate)
    _complete_step: int | None = None
    """The newest step that all ranks have; None: not known yet."""
    _saved_ns: int | None = None
    """When that step was saved, or the job began; None: not known yet."""
    _asked_ns: int | None = None
    _asked: int = 0
    """The number of requests since the newest step was on all disks."""

    def next(self) -> PersistRule:
        """The rule of the next generation."""
        return PersistRule(self.policy, _saved_ns=self._saved_ns, _asked_ns=self._asked_ns, _asked=self._asked)

    def observe(self, ranks: Sequence[DiskProgress], complete_step: int, now_ns: int) -> int | None:
        """Return the step to request from all machines, or None. Call this often.

        Args:
            ranks: All ranks of one generation, as their machines showed them last.
            complete_step: The newest step that all of them have on disk; 0: there is none.
            now_ns: The current time of a clock that is never set.
        """
        newest = max((rank.completed_steps for rank in ranks), default=-1)
        self._pace.look(now_ns, newest)
        every_ns = round(self._every_min(newest, complete_step) * 60e9)
        if not ranks or not every_ns or newest < 1:
            return None
        self._look(ranks, complete_step, now_ns)
        wanted = max(rank.wanted for rank in ranks)
        if wanted > newest:
            # Repeat the request while a machine does not have it; other machines ignore the repetition.
            return None if all(rank.wanted == wanted for rank in ranks) else wanted
        step_s = self._pace.step_s()
        if wanted >= 0 or step_s is None or now_ns < self._due_ns(every_ns):
            return None
        self._asked_ns = now_ns
        self._asked += 1
        every = 0 if self.policy.disk_every_min else self.policy.disk_every_steps
        return coming_step(newest, step_s, every=every)

    def _every_min(self, newest: int, complete_step: int) -> float:
        """Return how old the newest step on all disks may get, minutes; 0: no step is requested."""
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
