"""The copies that belong to the line of steps which led to the job's current state.

A generation that begins at step 20 disowns all copies that earlier generations saved beyond step 20, and a generation
that begins from nothing disowns all copies. Agents delete such copies when they launch a generation; but a machine may
have been away then, remote storage is not cleaned, and a job's name may be used again for another job. So every copy is
compared with the line before it is used. Between runs of the name ids tell (``everstep/model/run_id.py``), within one
run generations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.decisions.keep.choose_restore import MEMORY
from everstep.model.evidence import Evidence
from everstep.model.state_copy import CopyToRestore, StateCopy, Tier

FROM_NOTHING = -1
"""The step of a generation that restored no copy of everstep."""
KEPT = 100
"""The number of launches that are remembered separately; older launches are merged, on the safe side."""

Lineage = Sequence[tuple[int, int]]
"""The launched generations, oldest first: the number of each, and the completed steps that it began with."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The identity of a job's run among the runs of the job's name."""

    own: str = ""
    """The id of the run; empty: it began before there were ids, and its generations identify it."""
    origins: tuple[str, ...] = ()
    """Ids of the earlier runs that saved the copies from which this run was started; empty: none, or not known."""


UNKNOWN = Runs()


def extended(lineage: Lineage, launches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the line after further launches.

    If the line grows too long, its two oldest entries after the first become one entry with the lower step: some usable
    copies between them are refused, but an unusable copy is never used.
    """
    line = [*lineage, *launches]
    while len(line) > KEPT:
        (_, before), (generation, step) = line[1:3]
        line[1:3] = [(generation, min(before, step))]
    return line


def is_ours(copy: StateCopy, lineage: Lineage, runs: Runs = UNKNOWN) -> bool:
    """Return whether the job's current state descends from this copy.

    Of the runs from which it was started that is all files up to where it began (what is left of it in memory is thrown
    away), of any other run nothing. Within its own run, or where ids are not known, every generation after the one that
    saved it must have begun at its step or later; one that was never launched is of another run of the name, and ours
    only at the step from which this run was started. A copy without a generation counts as ours.
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
    """Return the copies of the line, which may be restored; copies that failed since they were listed are marked not
    valid.

    All of them count as the job's own run: the state at the step from which it
    was started is the same, whichever of the two runs keeps it.

    Args:
        held: The copies that the machines listed.
        lineage: The line of the job.
        bad: Copies that could not be used, with reasons; a later one wins.
        runs: The run of the job.
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
    """Return the own slots that their ranks could not restore, as the ranks reported when they ended.

    Args:
        evidence: The evidence of the stop of the generation that restored.
        resume_step: The step at which that generation began.
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
