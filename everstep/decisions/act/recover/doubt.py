"""The doubt about a restart: a newer step may exist in a location that could not be listed.

Unknown is not empty: a job never resumes from a step while every rank may have a copy of a newer step: in locations
that answered, in copies that could not be brought, or in locations that did not answer. A step is *certain* when no
later one can exist: each later step was never saved by some rank, or is in none of a rank's locations that could be
listed and was never due in those that could not.

These facts bound a step in a location that could not be listed:

* Nothing is copied that was not saved. A rank's own slots hold the newest save,
  whatever else is lost; where they are lost with their machine, it is not known.
* Files on disk are of steps that are due by their number, or that machines were
  asked for; remote storage has only what was on disk. Until this generation
  began there may be any.
* A rank's files are on the disk of the machine that runs it, or on remote storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.base.text import listed
from everstep.decisions.keep.choose_restore import MEMORY
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence
from everstep.model.machine import Assignment
from everstep.model.state_copy import StateCopy, Tier
from everstep.slots.format import CUT_SHORT, NEVER_USED

SHOWN = 4
"""The number of locations and machines that a reason names; further ones are counted."""
NOT_ASKED = "not asked yet"


@dataclass(frozen=True, slots=True)
class Doubt:
    """A newer step may exist."""

    newest: int | None
    """The newest that may; None: it is not known which."""
    places: tuple[str, ...]
    """The locations that did not answer, and the copies that could not be brought, each with the reason."""
    to_ask: bool
    """Some of these places were not asked yet."""
    unlisted: bool
    """There are places that could not be looked at, and not only copies that could not be brought."""

    @property
    def text(self) -> str:
        """The doubt as text for people: ``step 120 may exist: disk of m1 (no answer for 5 s)``."""
        what = "a newer step" if self.newest is None else f"step {self.newest}"
        return f"{what} may exist: {listed(self.places, SHOWN, noun='places', separator='; ')}"


@dataclass(frozen=True, slots=True)
class Known:
    """The facts about a stopped job's copies."""

    held: Sequence[StateCopy]
    """Copies of the job's own line; those that failed are marked as not valid."""
    unreached: Sequence[StateCopy]
    """Those of them that may be good: they could not be brought."""
    evidence: Evidence
    assignment: Assignment[str]
    resume_step: int
    """The step at which the newest generation began."""
    policy: CheckpointPolicy
    not_after: int | None = None
    """Later steps are not wanted, whether there are any or not; None: the newest is."""


def doubt_of(step: int, known: Known) -> Doubt | None:
    """Return the newer steps that may exist beyond the step of the restart; None: the step is certain."""
    return _NewerSteps(known).beyond(max(step, 0))


@dataclass(slots=True)
class _NewerSteps:
    """A search for steps that are newer than the step of the restart."""

    known: Known
    _copies: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Rank → steps of which there is a copy that may be good."""
    _own: dict[int, list[StateCopy]] = field(default_factory=lambda: defaultdict(list))
    """Rank → all steps that its own slots list."""
    _stuck: list[StateCopy] = field(default_factory=list)
    """Copies that could not be brought."""
    _bounds: list[int | None] = field(default_factory=list)
    """The newest step that each rank may have saved; None: not known."""

    def __post_init__(self) -> None:
        stuck = {_key(copy) for copy in self.known.unreached}
        ranks = range(self.known.assignment.topology.world_size)
        limit = self.known.not_after
        for copy in self.known.held:
            if copy.rank not in ranks:
                continue  # of a run of the name that had more of them
            wanted = limit is None or copy.completed_steps <= limit
            if wanted and (copy.valid or _key(copy) in stuck):
                self._copies[copy.rank].add(copy.completed_steps)
            if wanted and not copy.valid and _key(copy) in stuck:
                self._stuck.append(copy)
            if copy.tier is Tier.OWN and copy.machine == self.known.assignment.home(copy.rank):
                self._own[copy.rank].append(copy)
        completed = {end.rank: end.completed_steps for end in self.known.evidence.exits}
        saves = any(copy.tier in MEMORY for copy in self.known.held)
        self._bounds = [self._bound(rank, completed.get(rank, -1), saves) for rank in ranks]
        if limit is not None:
            self._bounds = [limit if bound is None else min(bound, limit) for bound in self._bounds]

    def beyond(self, step: int) -> Doubt | None:
        disks, remote = self._unknown_disks(), self._unknown_remote()
        ranks = range(self.known.assignment.topology.world_size)
        unseen = {rank for rank in ranks if remote or self.known.assignment.home(rank) in disks}
        # The evidence was cut: it does not say either what a rank has beyond the step.
        cut = set(ranks) if self.known.evidence.held_cut and unseen else set()
        newer = self._newest(step, unseen | cut)
        if newer is None:
            return None
        newest = None if newer < 0 else newer
        stuck = [copy for copy in self._stuck if copy.completed_steps > step]
        places = [*_disks_text(disks), *([f"remote storage ({remote})"] if remote else []), *_stuck_text(stuck)]
        to_ask = NOT_ASKED in {remote, *disks.values()}
        return Doubt(newest, tuple(places), to_ask, bool(disks or remote))

    def _newest(self, step: int, unseen: set[int]) -> int | None:
        """The newest later step of which every rank may have a copy; None: there is none, -1: any.

        Args:
            step: That is known.
            unseen: Ranks that may have copies in places that could not be listed.
        """
        ranks = range(self.known.assignment.topology.world_size)
        bounds = [bound for rank in unseen if (bound := self._bounds[rank]) is not None]
        most = min(bounds) if bounds else None
        candidates = {candidate for steps in self._copies.values() for candidate in steps if candidate > step}
        if len(unseen) == len(ranks):
            due = self._newest_due(most)
            if due is None:
                return -1
            candidates.add(due)
        possible = [
            candidate
            for candidate in candidates
            if candidate > step
            and all(
                candidate in self._copies[rank] or (rank in unseen and self._may_hold(rank, candidate))
                for rank in ranks
            )
        ]
        return max(possible, default=None)

    def _may_hold(self, rank: int, step: int) -> bool:
        bound = self._bounds[rank]
        return (bound is None or step <= bound) and self._is_due(step)

    def _bound(self, rank: int, completed: int, saves: bool) -> int | None:
        """The newest step that a rank may have saved; ``saves``: some rank of the job has saved something."""
        if self.known.assignment.home(rank) in self.known.evidence.emptied:
            return None
        own = self._own[rank]
        damaged = any(copy.completed_steps < 0 and copy.reason not in {NEVER_USED, CUT_SHORT} for copy in own)
        if own and not damaged and not self.known.evidence.held_cut:
            return max(self.known.resume_step, *(copy.completed_steps for copy in own))
        if completed < 0 and saves:
            return None  # nothing is left that would say how far this rank had come
        return max(completed, self.known.resume_step)

    def _is_due(self, step: int) -> bool:
        """Return whether a step may have been written to a disk."""
        policy, asked = self.known.policy, self.known.evidence.disk_asked
        if step <= self.known.resume_step:
            return True
        by_number = policy.disk_every_steps > 0 and step % policy.disk_every_steps == 0
        by_time = policy.disk_every_min > 0 and (asked is None or step <= asked)
        return policy.disk and (by_number or by_time)

    def _newest_due(self, bound: int | None) -> int | None:
        """The newest step up to a bound that may have been written; 0: none, None: there is no end to them."""
        policy, asked = self.known.policy, self.known.evidence.disk_asked
        every = policy.disk_every_steps
        limits = [self.known.resume_step if bound is None else min(bound, self.known.resume_step), 0]
        if policy.disk and every > 0:
            if bound is None:
                return None
            limits.append(bound - bound % every)
        if policy.disk and policy.disk_every_min > 0:
            if bound is None and asked is None:
                return None
            limits.append(min(limit for limit in (bound, asked) if limit is not None))
        return max(limits)

    def _unknown_disks(self) -> dict[str, str]:
        """Machine → why it is not known what lies on its disk."""
        evidence = self.known.evidence
        unknown = {
            machine: place.reason
            for place in evidence.unlisted
            if place.tier is Tier.DISK
            for machine in place.machines
        }
        if self.known.policy.disk_path and not evidence.searched:
            # The agent of a machine that came back empty does not know where to look.
            unknown |= dict.fromkeys(evidence.emptied, NOT_ASKED)
        return {machine: reason for machine, reason in unknown.items() if machine in self.known.assignment.machines}

    def _unknown_remote(self) -> str:
        """Why it is not known what lies on remote storage; empty: it is, or there is none."""
        evidence = self.known.evidence
        if not self.known.policy.remote_url:
            return ""
        if not evidence.searched:
            return NOT_ASKED
        return next((place.reason for place in evidence.unlisted if place.tier is Tier.REMOTE), "")


def _key(copy: StateCopy) -> tuple[int, int, str, str, int]:
    return copy.rank, copy.completed_steps, copy.tier, copy.machine, copy.saved_ns


def _disks_text(disks: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for machine, reason in disks.items():
        by_reason[reason].append(machine)
    return [f"disk of {listed(sorted(machines), SHOWN)} ({reason})" for reason, machines in by_reason.items()]


def _stuck_text(stuck: Iterable[StateCopy]) -> list[str]:
    return [
        f"the {copy.tier} of rank {copy.rank} on {copy.machine} could not be brought ({copy.reason})"
        for copy in sorted(stuck, key=lambda copy: (-copy.completed_steps, copy.rank))
    ]


def remembering(evidence: Evidence, lost: Sequence[str]) -> set[str]:
    """Return the machines whose memory is unchanged since the ranks ran: they would know of a step.

    Args:
        evidence: The evidence of the generation's stop.
        lost: Machines that came back empty.
    """
    of_ranks = {end.machine for end in evidence.exits}
    in_memory = {copy.machine for copy in evidence.held if copy.valid and copy.tier in (Tier.OWN, Tier.BACKUP)}
    return (of_ranks | in_memory) - set(lost)
