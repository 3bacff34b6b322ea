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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.base.text import listed
from everstep.decisions.keep.choose_restore import MEMORY, all_ranks, at_home, union
from everstep.decisions.keep.lineage import split
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence
from everstep.model.machine import Assignment
from everstep.model.ranks import NO_RANKS, Ranks
from everstep.model.state_copy import StateCopies, Tier
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

    held: Sequence[StateCopies]
    """The copies of the job's own lineage; copies whose restore failed are marked as not valid."""
    unreached: Sequence[StateCopies]
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
    _all: Ranks = NO_RANKS
    _copies: dict[int, Ranks] = field(default_factory=lambda: defaultdict(Ranks))
    """Step → the ranks that have a copy of it that is valid or out of reach."""
    _unreached: list[StateCopies] = field(default_factory=list)
    """Copies that are out of reach."""
    _bounds: dict[int | None, Ranks] = field(default_factory=lambda: defaultdict(Ranks))
    """The newest step that ranks may have saved, or None if it is not known → these ranks."""

    def __post_init__(self) -> None:
        # An earlier run of the job's name may have had more ranks.
        self._all = all_ranks(self.facts.assignment)
        limit = self.facts.not_after
        for copies in self.facts.held:
            if limit is not None and copies.completed_steps > limit:
                continue
            ours = copies.among(self._all)
            if not copies.valid:
                stuck = [part for one in self.facts.unreached if (part := split(ours, one)[0]).places]
                self._unreached += stuck
                self._copies[copies.completed_steps] |= union(stuck)
            else:
                self._copies[copies.completed_steps] |= ours.ranks

    def beyond(self, step: int) -> Doubt | None:
        disks, remote = self._unknown_disks(), self._unknown_remote()
        unseen = self._all if remote else _ranks_of(disks, self.facts.assignment)
        if unseen:
            self._find_bounds()
        newer = self._newest(step, unseen)
        if newer is None:
            return None
        newest = None if newer < 0 else newer
        unreached = [copies for copies in self._unreached if copies.completed_steps > step]
        remote_text = [f"remote storage ({remote})"] if remote else []
        locations = [*_disks_text(disks), *remote_text, *_unreached_text(unreached)]
        to_ask = NOT_ASKED in {remote, *disks.values()}
        return Doubt(newest, tuple(locations), to_ask, bool(disks or remote))

    def _newest(self, step: int, unseen: Ranks) -> int | None:
        """Return the newest step, later than the restart's step, of which every rank may have a copy.

        None: there is no such step. -1: it may be any step.

        Args:
            step: The step of the restart.
            unseen: Ranks that may have copies in locations that could not be listed.
        """
        candidates = {candidate for candidate, ranks in self._copies.items() if candidate > step and ranks}
        if unseen == self._all:
            most = min((bound for bound, ranks in self._bounds.items() if bound is not None and ranks), default=None)
            due = self._newest_due(most)
            if due is None:
                return -1
            candidates.add(due)
        possible = [
            candidate
            for candidate in candidates
            if candidate > step and self._all <= (self._copies[candidate] | (unseen & self._may_hold(candidate)))
        ]
        return max(possible, default=None)

    def _may_hold(self, step: int) -> Ranks:
        """Return the ranks that may have a copy of a step in a location that could not be listed."""
        found = NO_RANKS
        for bound, ranks in self._bounds.items() if self._is_due(step) else ():
            if bound is None or step <= bound:
                found |= ranks
        return found

    def _find_bounds(self) -> None:
        """Find the newest step that each rank may have saved."""
        facts, evidence = self.facts, self.facts.evidence
        emptied = _ranks_of(evidence.emptied, facts.assignment)
        own = [at_home(copies, facts.assignment) for copies in facts.held if copies.tier is Tier.OWN]
        damaged = union(
            copies for copies in own if copies.completed_steps < 0 and copies.reason not in {NEVER_USED, CUT_SHORT}
        )
        left = self._all - emptied
        listed_own = (union(own) - damaged) & left
        self._add_bound(None, emptied)
        for copies in sorted(own, key=lambda copies: -copies.completed_steps):
            self._add_bound(max(facts.resume_step, copies.completed_steps), copies.ranks & listed_own)
            listed_own -= copies.ranks
            left -= copies.ranks - damaged
        saves = any(copies.tier in MEMORY for copies in facts.held)
        for end in evidence.exits:
            if end.completed_steps >= 0:
                self._add_bound(max(end.completed_steps, facts.resume_step), end.ranks & left)
                left -= end.ranks
        # Neither the slots nor the ends of the other ranks show how many steps they completed.
        self._add_bound(None if saves else max(-1, facts.resume_step), left)

    def _add_bound(self, bound: int | None, ranks: Ranks) -> None:
        limit = self.facts.not_after
        if limit is not None:
            bound = limit if bound is None else min(bound, limit)
        self._bounds[bound] |= ranks

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


def _unreached_text(unreached: Iterable[StateCopies]) -> list[str]:
    return [
        f"the {copies.tier} of rank {listed([*copies.ranks])} on {listed([*copies.places])} is out of reach "
        f"({copies.reason})"
        for copies in sorted(unreached, key=lambda copies: (-copies.completed_steps, copies.ranks.first))
    ]


def _ranks_of(machines: Iterable[str], assignment: Assignment[str]) -> Ranks:
    """Return the ranks that some machines run."""
    names, size = set(machines), assignment.topology.ranks_per_machine
    numbers = (number for number, name in enumerate(assignment.machines) if name in names) if names else ()
    return Ranks.of_spans((number * size, (number + 1) * size - 1) for number in numbers)


def is_remembered(evidence: Evidence, lost: Collection[str], assignment: Assignment[str]) -> bool:
    """Return whether a machine still knows how far the ranks had progressed.

    Args:
        evidence: The evidence of the generation's stop.
        lost: Machines that lost their memory.
        assignment: The machines, by name, that ran the ranks.
    """
    gone = _ranks_of(lost, assignment)
    in_memory = (copies for copies in evidence.held if copies.valid and copies.tier in MEMORY)
    return any(end.ranks - gone for end in evidence.exits) or any(
        copies.places.keys() - set(lost) for copies in in_memory
    )
