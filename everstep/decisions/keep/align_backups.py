"""Chooses the steps that machines back up together, so that all ranks have a common step after the loss of a machine.

While every machine keeps up, each backs up every step without coordination: ranks are never more than a step apart, so
the machines have a common step. Once some machine falls behind, the machines are *aligned*. The watchers name a coming
step. Each machine reserves a slot for it before its ranks reach it, and sends only that step. A machine keeps the
previously named step, in its own memory and at its peer, until it is notified that the new step is *complete*, i.e.
that every rank has backed it up. The next step is named only after that. The fields ``whole`` have the newest complete
step.

If a job hangs before it reaches the first named step, that step is never complete. Then each machine backs up on its
own again, since otherwise no step would be backed up. Machines are also aligned while ranks drift apart by more steps
than their slots hold (``everstep/decisions/keep/drift.py``).

There may be several watchers, messages may be late, lost or repeated, and agents and workers may be restarted. So every
conclusion rests on facts that stay true. A rank that adopted a named step sends no older step, and never adopts a step
that its saves have passed. A step is *settled* if it is complete, or can never be: some rank passed it without adopting
it, or has adopted a later step. A rank that backed up a named step backs up no other step until that one is settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.decisions.keep.disk_schedule import StepRate, next_multiple, steps_ahead

BEHIND_S = 1.0
"""Machines are aligned when one machine has been behind by at least two due steps for this long, seconds."""
LEAD_S = 1.5
"""How far ahead a named step is, seconds: within this time every machine should receive the name."""
MOST_LEAD_S = 12.0
"""The largest lead, seconds. The lead doubles with each name that arrives too late, since messages are slow or steps
are short."""
EASE = 0.9
"""The factor by which the lead shrinks after each complete step, down to ``LEAD_S``."""
HANG_S, HANG_STEPS = 3.0, 3
"""For backups, a job hangs if its next step takes longer than ``HANG_S`` seconds, and longer than ``HANG_STEPS`` recent
steps."""
CALM = 3
"""Each machine backs up on its own again after every machine kept up with this many named steps in a row."""
GIVEN_UP_S = 15.0
"""A rank whose backups fail for this long, seconds, is not waited for any more; slow backups are no failures."""

NO_NAMED_STEP = 0
"""The name that means that each machine backs up on its own."""


@dataclass(frozen=True, slots=True)
class Backed:
    """The state of one rank's backups, as its machine reports it."""

    rank: int
    own_step: int
    """The newest step in the rank's own memory; -1: none."""
    backup_step: int
    """The newest step at the rank's peer; -1: none."""
    named: int
    """The named step that the rank adopted last; ``NO_NAMED_STEP``: it backs up on its own."""
    whole: int
    """The newest complete step of which the rank was notified; 0: none."""
    calm: int
    """The number of named steps in a row that the rank backed up before the next step was due."""
    failing: bool
    """The rank's backups fail at the moment."""
    apart: int = 0
    """By how many steps ranks drift apart, as the machine was last notified."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """The message of the watchers to all machines about their backups."""

    whole: int
    """The newest complete step: every rank has it in its own memory and at its peer; 0: none is known."""
    settled: int
    """Every step up to this step is complete, or never will be."""
    named: int
    """The step to back up next; ``NO_NAMED_STEP``: each machine backs up on its own."""
    apart: int = 0
    """By how many steps ranks drift apart, if that is more than their slots hold; 0: their slots have a common step."""


@dataclass(slots=True)
class AlignRule:
    """The alignment of backups for one generation of a job."""

    world_size: int
    every: int = 1
    """The setting ``backup_every_steps``."""
    _distance: int = 1
    """Ranks save after the steps that are multiples of this number."""
    _pace: StepRate = field(default_factory=StepRate)
    _target_step: int = 0
    """The step that was last named, whether ranks adopted it or not."""
    _lead_s: float = LEAD_S
    _complete_step: int = 0
    _behind: dict[int, int] = field(default_factory=dict)
    """Rank that is behind → since when."""
    _failing: dict[int, int] = field(default_factory=dict)
    """Rank whose backups fail → since when."""

    def observe(self, ranks: Sequence[Backed], now_ns: int, *, apart: int = 0, distance: int = 1) -> Aligned | None:
        """Return the message for all machines; None: all machines have it already. Call this often.

        Args:
            ranks: The ranks of one generation, as their machines last showed them.
            now_ns: The current time.
            apart: The number of steps by which ranks drift apart (``DriftRule``); 0: their slots have a common step.
            distance: Ranks save after the steps that are multiples of this number.
        """
        self._distance = distance
        newest = max((rank.own_step for rank in ranks), default=-1)
        self._pace.observe(now_ns, newest)
        if len(ranks) < self.world_size or any(rank.own_step < 0 for rank in ranks):
            return None
        behind, given_up = self._is_behind(ranks, now_ns) or apart > 0, self._given_up(ranks, now_ns)
        adopted = max(rank.named for rank in ranks)
        before, self._complete_step = self._complete_step, self._conclude(ranks, adopted, given_up)
        if self._complete_step > before:
            self._lead_s = max(EASE * self._lead_s, LEAD_S)
        on_time = all(rank.calm >= CALM for rank in ranks if rank.named != NO_NAMED_STEP and rank.rank not in given_up)
        hung = not self._complete_step and self._pace.is_hung(now_ns, HANG_S, HANG_STEPS)
        # A job that hangs would not reach another named step.
        if hung and (adopted == NO_NAMED_STEP or adopted > newest):
            aligned = Aligned(0, max(adopted - 1, 0), NO_NAMED_STEP, apart)
        elif adopted > self._complete_step and not _missed(ranks, adopted):
            aligned = Aligned(self._complete_step, adopted - 1, adopted, apart)
        elif behind or (adopted and not on_time):
            if (target_step := self._next(ranks, newest, adopted)) is None:
                return None
            aligned = Aligned(self._complete_step, adopted, target_step, apart)
        else:
            aligned = Aligned(0, adopted, NO_NAMED_STEP, apart)
        return None if all(_knows(rank, aligned) for rank in ranks) else aligned

    def _conclude(self, ranks: Sequence[Backed], adopted: int, given_up: set[int]) -> int:
        """Return the newest complete step; 0: none is known."""
        if adopted and all(_has(rank, adopted, given_up) for rank in ranks):
            return adopted
        complete_step = max(self._complete_step, *(rank.whole for rank in ranks))
        # A rank that backs up on its own, or did so until it adopted a later name, has not promised to keep the step.
        kept = all(rank.named != NO_NAMED_STEP and (rank.whole or complete_step >= rank.named) for rank in ranks)
        return complete_step if kept else 0

    def _next(self, ranks: Sequence[Backed], newest: int, adopted: int) -> int | None:
        """Return the coming step to name, the same until ranks have passed it; None: the pace is not known yet."""
        step_s = self._pace.step_s()
        if step_s is None:
            return None
        late = _missed(ranks, self._target_step)
        if late:
            self._lead_s = min(2 * self._lead_s, MOST_LEAD_S)
        if self._target_step <= adopted or late:
            self._target_step = next_multiple(newest + steps_ahead(self._lead_s, step_s), self._distance)
        return self._target_step

    def _is_behind(self, ranks: Sequence[Backed], now_ns: int) -> bool:
        """Return whether a rank that backs up on its own lags although its backups do not fail."""
        for rank in ranks:
            if rank.failing or rank.named != NO_NAMED_STEP or self._late(rank) < 2:
                self._behind.pop(rank.rank, None)
            else:
                self._behind.setdefault(rank.rank, now_ns)
        return any(now_ns - since_ns >= BEHIND_S * 1e9 for since_ns in self._behind.values())

    def _late(self, rank: Backed) -> int:
        """Return the number of due steps that are not at the rank's peer."""
        due = max(self.every, self._distance)
        return rank.own_step // due - max(rank.backup_step, 0) // due

    def _given_up(self, ranks: Sequence[Backed], now_ns: int) -> set[int]:
        self._failing = {rank.rank: self._failing.get(rank.rank, now_ns) for rank in ranks if rank.failing}
        return {number for number, since_ns in self._failing.items() if now_ns - since_ns >= GIVEN_UP_S * 1e9}


def _has(rank: Backed, step: int, given_up: set[int]) -> bool:
    """Return whether a rank adopted a step and keeps it, in its own memory and at its peer."""
    kept = rank.own_step >= step if rank.rank in given_up else rank.backup_step == step
    return rank.named == step and kept


def _missed(ranks: Sequence[Backed], step: int) -> bool:
    """Return whether some rank has passed a step without adopting it, so that it never will."""
    return any(rank.own_step >= step > rank.named for rank in ranks)


def _knows(rank: Backed, aligned: Aligned) -> bool:
    return rank.named == aligned.named and rank.whole >= aligned.whole and rank.apart == aligned.apart
