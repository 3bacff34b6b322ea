"""Chooses the next step that all machines write to disk if steps are due by time, and the step that all ranks keep.

Every machine must write the same step, and must know of it before its ranks have passed it. So the watchers request a
step that is some seconds ahead. Several watchers may do so at once. They choose the next multiple of a power of two, so
that they mostly request the same step, and request no other step while one is pending.

Disks differ in speed: a slow disk gets every 2nd, 4th, … step of a fast disk, and gets it later. A machine that deletes
old steps may delete a step that another machine has just finished. So the watchers send the newest step that all ranks
have to all machines, as the step to *keep*. A machine that has it acknowledges that, and does not delete it. When all
machines have acknowledged the step, it is *settled*. Only then may older steps be deleted, and the next step is sent.

Messages may be late, lost or repeated, there may be several watchers, and agents and workers may be restarted. So every
conclusion rests on facts that stay true. A machine gives up a step that it keeps only if a later step is settled, or if
the step is *gone*: some rank has passed it without writing it to disk, and so never will.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import ceil, lcm

from everstep.model.checkpoint_policy import CheckpointPolicy

SAMPLES = 64
"""The number of samples from which the time of a step is computed."""
LEAST_AHEAD = 2
"""A requested step is at least this many steps ahead, since the next step may be complete before the request
arrives."""


@dataclass(slots=True)
class StepRate:
    """The speed at which one generation of a job steps."""

    _samples: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Time in nanoseconds, and the number of steps at that time."""
    _newest_ns: int = 0
    """When the newest step was first seen, nanoseconds; 0: no step was seen."""
    _took_ns: int = 0
    """The time from the step that was seen before it to the newest step, nanoseconds."""

    def observe(self, now_ns: int, newest: int) -> None:
        """Add a sample: the number of steps of the rank that is furthest; negative: not known yet."""
        if newest < 0:
            return
        last = self._samples[-1][1] if self._samples else -1
        if newest > last:
            self._took_ns = now_ns - self._newest_ns if self._newest_ns else 0
            self._newest_ns = now_ns
        self._samples.append((now_ns, newest))

    def is_hung(self, now_ns: int, least_s: float, factor: int) -> bool:
        """Return whether the next step takes longer than ``least_s`` seconds, and ``factor`` times as long as the
        newest."""
        return bool(self._newest_ns) and now_ns - self._newest_ns > max(least_s * 1e9, factor * self._took_ns)

    def step_s(self) -> float | None:
        """Return the mean time of a step over the last samples, seconds; None before a step was completed."""
        if not self._samples:
            return None
        (first_ns, first), (last_ns, last) = self._samples[0], self._samples[-1]
        return (last_ns - first_ns) / 1e9 / (last - first) if last > first else None


def steps_ahead(lead_s: float, step_s: float) -> int:
    """Return how many steps take ``lead_s`` seconds when each takes ``step_s``, at least ``LEAST_AHEAD``."""
    return max(ceil(lead_s / step_s), LEAST_AHEAD) if step_s > 0 else LEAST_AHEAD


@dataclass(frozen=True, slots=True)
class StepsOnDisk:
    """The steps on the disk of a rank's machine, as the machine reports them; equal for all ranks of a machine."""

    steps: frozenset[int]
    """Steps that are on disk for all ranks of the machine."""
    passed: int = 0
    """Every step up to this step is among ``steps`` or never will be; 0: not known."""
    kept: int = 0
    """The step that the machine keeps until it is notified that the step is settled or gone; 0: none."""
    settled: int = 0
    """The newest settled step of which the machine was notified; 0: none."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The message of the watchers to all machines about the steps on their disks."""

    keep: int = 0
    """The step that every machine should keep; 0: there is none."""
    settled: int = 0
    """The newest step that every machine keeps: older steps may be deleted; 0: none."""
    gone: tuple[int, ...] = ()
    """Steps on some disk that some rank does not have and never will have."""


def newest_of_all(ranks: Collection[StepsOnDisk]) -> int:
    """Return the newest step that all these ranks have on disk; 0: there is none."""
    return max(frozenset.intersection(*(disk.steps for disk in set(ranks))), default=0) if ranks else 0


def agree(ranks: Sequence[StepsOnDisk], world_size: int) -> Agreed:
    """Return the message for all machines.

    Args:
        ranks: The ranks of one generation, as their machines last showed them.
        world_size: The number of ranks of the job; if some of them are not shown, the message is empty.
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
"""How far ahead a requested step is, seconds: within this time the request reaches every machine."""
AGAIN_S = 60.0
"""The shortest time between two requests of one watcher, seconds. It doubles with each request that leads to no step,
up to ``disk_every_min``."""
MISSED_MIN = 15.0
"""If steps are due only by their number, a step is requested after this many minutes without a new step on all
disks."""


@dataclass(frozen=True, slots=True)
class DiskProgress:
    """The progress of one rank and its disk, as its machine reports it. Ages are by the machine's own clock."""

    rank: int
    completed_steps: int
    disk_step: int
    """The step of the rank's newest disk checkpoint; -1: there is none."""
    disk_age_s: float
    """The age of the state in that checkpoint, seconds."""
    lived_s: float
    """The age of the rank's process, seconds; it counts while there is no disk checkpoint."""
    wanted: int
    """The requested step that is not written yet; -1: none."""


@dataclass(slots=True)
class PersistRule:
    """The rule that requests a step when the newest step on all disks is too old, for one generation of a job.

    Only the watcher's clock counts, from the moment at which the watcher saw a step on all disks. From a machine's
    clock only the difference between two times is used.
    """

    policy: CheckpointPolicy
    _pace: StepRate = field(default_factory=StepRate)
    _complete_step: int | None = None
    """The newest step that all ranks have on disk; None: not known yet."""
    _saved_ns: int | None = None
    """When the newest step on all disks was saved, or when the job began; None: not known yet."""
    _asked_ns: int | None = None
    """When a step was last requested; None: never."""
    _asked: int = 0
    """The number of requests since the newest step was on all disks."""

    def next(self) -> PersistRule:
        """Return the rule for the next generation."""
        return PersistRule(self.policy, _saved_ns=self._saved_ns, _asked_ns=self._asked_ns, _asked=self._asked)

    def observe(
        self, ranks: Sequence[DiskProgress], complete_step: int, now_ns: int, *, distance: int = 1
    ) -> int | None:
        """Return the step to request from all machines, or None. Call this often.

        Args:
            ranks: All ranks of one generation, as their machines last showed them.
            complete_step: The newest step that all of them have on disk; 0: there is none.
            now_ns: The current time of a clock that is never set.
            distance: Ranks save after the steps that are multiples of this number.
        """
        newest = max((rank.completed_steps for rank in ranks), default=-1)
        self._pace.observe(now_ns, newest)
        every_ns = round(self._every_min(newest, complete_step) * 60e9)
        if not ranks or not every_ns or newest < 1:
            return None
        self._note_saved(ranks, complete_step, now_ns)
        wanted = max(rank.wanted for rank in ranks)
        if wanted > newest:
            # The request is repeated while a machine does not have it. Other machines ignore the repetition.
            return None if all(rank.wanted == wanted for rank in ranks) else wanted
        step_s = self._pace.step_s()
        if wanted >= 0 or step_s is None or now_ns < self._due_ns(every_ns):
            return None
        self._asked_ns = now_ns
        self._asked += 1
        every = 0 if self.policy.disk_every_min else self.policy.disk_every_steps
        return coming_step(newest, step_s, every=every, distance=distance)

    def _every_min(self, newest: int, complete_step: int) -> float:
        """Return how old the newest step on all disks may get, minutes; 0: no step is requested."""
        every = self.policy.disk_every_steps
        if not self.policy.disk or self.policy.disk_every_min:
            return self.policy.disk_every_min if self.policy.disk else 0.0
        return MISSED_MIN if every and newest - complete_step >= 2 * every else 0.0

    def _note_saved(self, ranks: Sequence[DiskProgress], complete_step: int, now_ns: int) -> None:
        """Record when the newest step on all disks was saved, if it is a later step than before."""
        later = complete_step > self._complete_step if self._complete_step is not None else self._saved_ns is None
        if later:
            # Some ranks report the age of a later step, so the oldest age is the closest.
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


def coming_step(newest: int, step_s: float, *, every: int = 0, distance: int = 1) -> int:
    """Return a step that is at least ``LEAD_S`` seconds and two steps ahead.

    It is the next multiple of a power of two. So watchers that ask at slightly different times, or measured slightly
    different ``step_s``, mostly get the same step.

    Args:
        newest: The completed steps of the rank that is furthest.
        step_s: The time of a step, seconds.
        every: Only multiples of this number are written to disk; 0: any step may be. Ranks save them at any pace.
        distance: Ranks save after the other steps that are multiples of this number.
    """
    ahead = steps_ahead(LEAD_S, step_s)
    multiple = every or lcm(1 << (ahead - 1).bit_length(), distance)
    return next_multiple(newest + ahead, multiple)


def next_multiple(step: int, multiple: int) -> int:
    """Return the smallest multiple of a number that is not below a step."""
    return -(-step // multiple) * multiple
