"""Judges whether the step of a restart is in doubt: a newer step may exist in a location that could not be listed.

A location that does not answer may still have copies. So a job does not resume from a step while every rank may have a
copy of a newer step. Such a copy is listed, or is listed but out of reach, or may be in a location that could not be
listed. A step is *certain* if no newer step can be complete.

These facts limit the steps in a location that could not be listed:

* A step that a rank never saved was never copied. The newest save of a rank is in its own slots. If the slots were lost
  with their machine, the newest save is not known.
* A disk has only steps that are due by their number, or that the machines were asked to write. Remote storage has only
  steps that were on a disk. Steps up to the beginning of this generation may be anywhere.
* The files of a rank are on the disk of its machine, or on remote storage.
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
"""The number of locations and machines that a reason names; the rest is counted."""
NOT_ASKED = "not asked yet"


@dataclass(frozen=True, slots=True)
class Doubt:
    """A newer step may exist."""

    newest: int | None
    """The newest step that may exist; None: any step may exist."""
    locations: tuple[str, ...]
    """The locations that did not answer, and the copies that are out of reach, each with the reason."""
    to_ask: bool
    """Some of these locations were not asked yet."""
    unlisted: bool
    """Some location could not be listed; False: only copies are out of reach."""

    @property
    def text(self) -> str:
        """The doubt as text for people: ``step 120 may exist: disk of m1 (no answer for 5 s)``."""
        step = "a newer step" if self.newest is None else f"step {self.newest}"
        return f"{step} may exist: {listed(self.locations, SHOWN, noun='locations', separator='; ')}"


@dataclass(frozen=True, slots=True)
class DoubtFacts:
    """The facts about a stopped job's copies."""

    held: Sequence[StateCopy]
    """The copies of the job's own lineage; copies whose restore failed are marked as not valid."""
    unreached: Sequence[StateCopy]
    """Copies among ``held`` that are not valid only because they are out of reach."""
    evidence: Evidence
    assignment: Assignment[str]
    resume_step: int
    """The step at which the newest generation began."""
    policy: CheckpointPolicy
    not_after: int | None = None
    """The newest step that the job may resume from; None: any step."""


def doubt_of(step: int, facts: DoubtFacts) -> Doubt | None:
    """Return the doubt about a restart from a step; None: the step is certain."""
    return _NewerSteps(facts).beyond(max(step, 0))


@dataclass(slots=True)
class _NewerSteps:
    """A search for steps that are newer than the step of the restart."""

    facts: DoubtFacts
    _copies: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Rank → the steps of its copies that are valid or out of reach."""
    _own: dict[int, list[StateCopy]] = field(default_factory=lambda: defaultdict(list))
    """Rank → the copies in its own slots, valid or not."""
    _unreached: list[StateCopy] = field(default_factory=list)
    """Copies that are out of reach."""
    _bounds: list[int | None] = field(default_factory=list)
    """The newest step that each rank may have saved; None: not known."""

    def __post_init__(self) -> None:
        unreached = {copy.key for copy in self.facts.unreached}
        ranks = range(self.facts.assignment.topology.world_size)
        limit = self.facts.not_after
        for copy in self.facts.held:
            if copy.rank not in ranks:
                continue  # an earlier run of the job's name had more ranks
            wanted = limit is None or copy.completed_steps <= limit
            if wanted and (copy.valid or copy.key in unreached):
                self._copies[copy.rank].add(copy.completed_steps)
            if wanted and not copy.valid and copy.key in unreached:
                self._unreached.append(copy)
            if copy.tier is Tier.OWN and copy.machine == self.facts.assignment.home(copy.rank):
                self._own[copy.rank].append(copy)
        completed = {end.rank: end.completed_steps for end in self.facts.evidence.exits}
        saves = any(copy.tier in MEMORY for copy in self.facts.held)
        self._bounds = [self._bound(rank, completed.get(rank, -1), saves) for rank in ranks]
        if limit is not None:
            self._bounds = [limit if bound is None else min(bound, limit) for bound in self._bounds]

    def beyond(self, step: int) -> Doubt | None:
        disks, remote = self._unknown_disks(), self._unknown_remote()
        ranks = range(self.facts.assignment.topology.world_size)
        unseen = {rank for rank in ranks if remote or self.facts.assignment.home(rank) in disks}
        if unseen and self.facts.evidence.held_cut:
            unseen = set(ranks)  # the list of copies was cut: any rank may have a newer copy
        newer = self._newest(step, unseen)
        if newer is None:
            return None
        newest = None if newer < 0 else newer
        unreached = [copy for copy in self._unreached if copy.completed_steps > step]
        remote_text = [f"remote storage ({remote})"] if remote else []
        locations = [*_disks_text(disks), *remote_text, *_unreached_text(unreached)]
        to_ask = NOT_ASKED in {remote, *disks.values()}
        return Doubt(newest, tuple(locations), to_ask, bool(disks or remote))

    def _newest(self, step: int, unseen: set[int]) -> int | None:
        """Return the newest step, later than the restart's step, of which every rank may have a copy.

        None: there is no such step. -1: it may be any step.

        Args:
            step: The step of the restart.
            unseen: Ranks that may have copies in locations that could not be listed.
        """
        ranks = range(self.facts.assignment.topology.world_size)
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
        """Return the newest step that a rank may have saved; None: not known. ``saves``: the job saves to memory."""
        if self.facts.assignment.home(rank) in self.facts.evidence.emptied:
            return None
        own = self._own[rank]
        damaged = any(copy.completed_steps < 0 and copy.reason not in {NEVER_USED, CUT_SHORT} for copy in own)
        if own and not damaged and not self.facts.evidence.held_cut:
            return max(self.facts.resume_step, *(copy.completed_steps for copy in own))
        if completed < 0 and saves:
            return None  # neither its slots nor its end show how many steps the rank completed
        return max(completed, self.facts.resume_step)

    def _is_due(self, step: int) -> bool:
        """Return whether a step may have been written to a disk."""
        policy, asked = self.facts.policy, self.facts.evidence.disk_asked
        if step <= self.facts.resume_step:
            return True
        by_number = policy.disk_every_steps > 0 and step % policy.disk_every_steps == 0
        by_time = policy.disk_every_min > 0 and (asked is None or step <= asked)
        return policy.disk and (by_number or by_time)

    def _newest_due(self, bound: int | None) -> int | None:
        """Return the newest step, up to a bound, that may have been written to a disk.

        0: no step was written. None: any step may have been written.
        """
        policy, asked = self.facts.policy, self.facts.evidence.disk_asked
        every = policy.disk_every_steps
        limits = [self.facts.resume_step if bound is None else min(bound, self.facts.resume_step), 0]
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
        """Return machine → why the copies on its disk are not known."""
        evidence = self.facts.evidence
        unknown = {
            machine: location.reason
            for location in evidence.unlisted
            if location.tier is Tier.DISK
            for machine in location.machines
        }
        if self.facts.policy.disk_path and not evidence.searched:
            # The agent of an emptied machine does not know the folder of the job.
            unknown |= dict.fromkeys(evidence.emptied, NOT_ASKED)
        return {machine: reason for machine, reason in unknown.items() if machine in self.facts.assignment.machines}

    def _unknown_remote(self) -> str:
        """Return why the copies on remote storage are not known; empty: they are known, or the job has no such
        storage."""
        evidence = self.facts.evidence
        if not self.facts.policy.remote_url:
            return ""
        if not evidence.searched:
            return NOT_ASKED
        return next((location.reason for location in evidence.unlisted if location.tier is Tier.REMOTE), "")


def _disks_text(disks: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for machine, reason in disks.items():
        by_reason[reason].append(machine)
    return [f"disk of {listed(sorted(machines), SHOWN)} ({reason})" for reason, machines in by_reason.items()]


def _unreached_text(unreached: Iterable[StateCopy]) -> list[str]:
    return [
        f"the {copy.tier} of rank {copy.rank} on {copy.machine} is out of reach ({copy.reason})"
        for copy in sorted(unreached, key=lambda copy: (-copy.completed_steps, copy.rank))
    ]


def remembering(evidence: Evidence, lost: Sequence[str]) -> set[str]:
    """Return the machines that still know how far the ranks had progressed.

    Args:
        evidence: The evidence of the generation's stop.
        lost: Machines that lost their memory.
    """
    of_ranks = {end.machine for end in evidence.exits}
    in_memory = {copy.machine for copy in evidence.held if copy.valid and copy.tier in (Tier.OWN, Tier.BACKUP)}
    return (of_ranks | in_memory) - set(lost)
