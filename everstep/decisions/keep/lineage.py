"""Which copies belong to the line of steps that led to the job as it is now.

A generation that begins at step 20 disowns what generations before it had
saved beyond 20, and one that begins from nothing disowns all of it. Agents throw
such copies away when they launch a generation; but a machine may have been away
then, remote storage asks nobody, and a job's name may be used again for
something else. So every copy is compared with the line before it is used. Between
runs of the name ids tell (``everstep/model/run_id.py``), within one run generations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.decisions.keep.choose_restore import MEMORY
from everstep.model.evidence import Evidence
from everstep.model.state_copy import CopyToRestore, StateCopy, Tier

FROM_NOTHING = -1
"""Where a generation began that restored nothing of ours."""
KEPT = 100
"""Launches that are remembered one by one; older ones are merged, on the safe side."""

Lineage = Sequence[tuple[int, int]]
"""Of each generation that was launched, oldest first: its number and the completed steps that it began with."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Which run of its name a job is."""

    own: str = ""
    """Its id; empty: it began before there were ids, and generations have to do."""
    origins: tuple[str, ...] = ()
    """Of the earlier runs that saved the copies from which it was started; empty: of none, or not known."""


UNKNOWN = Runs()


def extended(lineage: Lineage, launches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The line after further launches.

    Where it grows too long the two oldest entries after the first become one with
    the lower step: of copies between them some that would do are refused, and never one
    used that would not.
    """
    line = [*lineage, *launches]
    while len(line) > KEPT:
        (_, before), (generation, step) = line[1:3]
        line[1:3] = [(generation, min(before, step))]
    return line


def is_ours(copy: StateCopy, lineage: Lineage, runs: Runs = UNKNOWN) -> bool:
    """Whether the job as it is now went through this copy's state.

    Of the runs from which it was started that is all files up to where it began (what
    is left of it in memory is thrown away), of any other run nothing. Within its own
    run, or where ids are not known, every generation after the one that saved it must
    have begun at its step or later; one that was never launched is of another run of
    the name, and ours only at the step from which this run was started. A copy that
    does not say which generation saved it counts as ours.
    """
    if runs.own and copy.run not in {"", runs.own}:
        led_here = all(copy.completed_steps <= step for _, step in lineage)
        return copy.run in runs.origins and copy.tier not in MEMORY and led_here
    if copy.generation == 0 or not lineage:
        return True
    if copy.generation > lineage[-1][0]:
        first, origin = lineage[0]
        started_from_it = first == 1 and 0 < origin == copy.completed_steps
        return started_from_it and all(origin <= step for _, step in lineage)
    return all(copy.completed_steps <= step for generation, step in lineage if generation > copy.generation)


def usable(
    held: Iterable[StateCopy],
    lineage: Lineage,
    bad: Iterable[StateCopy] = (),
    runs: Runs = UNKNOWN,
    *,
    verified: Iterable[CopyToRestore] = (),
) -> list[StateCopy]:
    """The copies of the line, which may be restored; those that failed since they were listed are marked as not valid.

    All of them count as the job's own run: the state at the step from which it
    was started is the same, whichever of the two runs keeps it.

    Args:
        held: What the machines listed.
        lineage: The line of the job.
        bad: Copies that could not be used, with reasons; a later one wins.
        runs: Which run it is.
        verified: Copies whose contents were compared since they were listed.
    """
    verified_keys = {copy.key for copy in verified}
    reasons = {copy.key: copy.reason for copy in bad}
    ours: dict[tuple[str, int, int, bool], bool] = {}
    """Cache of ``is_ours``, by what all copies of a generation's step have in common."""
    found = []
    for copy in held:
        common = (copy.run, copy.generation, copy.completed_steps, copy.tier in MEMORY)
        if common not in ours:
            ours[common] = is_ours(copy, lineage, runs)
        if ours[common]:
            key = copy.key
            reason = reasons.get(key, reasons.get((*key[:-1], 0))) if reasons else None
            mine = {"run": runs.own} if runs.own and copy.run != runs.own else {}
            failed = {} if reason is None else {"valid": False, "reason": reason}
            compared = {"verified": True} if key in verified_keys else {}
            changed = mine | failed | compared
            found.append(copy.model_copy(update=changed) if changed else copy)
    return found


CORRUPT = "CorruptCheckpoint"
"""End of the name of what a rank raises when the state that it restores is damaged."""


def found_damaged(evidence: Evidence, resume_step: int) -> list[StateCopy]:
    """Own slots that their ranks could not restore from, as those ranks said when they ended.

    Args:
        evidence: Of the stop of the generation that restored.
        resume_step: Where it began.
    """
    exceptions = {
        (end.rank, end.machine): end.exception
        for end in evidence.exits
        if not end.stopped_by_us and end.exception.split(":")[0].endswith(CORRUPT)
    }
    return [
        copy.model_copy(
            update={"valid": False, "reason": f"its rank found it damaged: {exceptions[copy.rank, copy.machine]}"}
        )
        for copy in evidence.held
        if copy.valid and copy.tier is Tier.OWN and copy.completed_steps == resume_step > 0
        if (copy.rank, copy.machine) in exceptions
    ]
