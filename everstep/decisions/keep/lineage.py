"""Selects the copies that belong to the line of steps which led to the job's current state.

If a generation begins at step 20, copies of later steps that earlier generations saved do not belong to the line any
more. If a generation begins from nothing, no earlier copy belongs to the line. Agents delete copies outside of the line
when they launch a generation. But a machine may have been away then, remote storage is not cleaned, and a job's name
may be used for another job. So every copy is compared with the line before it is used. The run's id
(``everstep/model/run_id.py``) is compared first, then the generations within the run.
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
"""The number of launches that are remembered separately; older launches are merged."""

Lineage = Sequence[tuple[int, int]]
"""The launched generations of a run, oldest first: number and step at which each began."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The identity of a job's run among the runs of the job's name."""

    own: str = ""
    """The id of the run; empty: it began before runs had ids, and only its generations count."""
    origins: tuple[str, ...] = ()
    """Ids of the earlier runs that saved the copies from which this run was started; empty: none, or not known."""


UNKNOWN = Runs()


def extended(lineage: Lineage, launches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the line after further launches.

    If the line is too long, the two oldest entries after the first become one entry with the lower step. Then some
    copies of the line count as not usable, but no copy outside of the line counts as usable.
    """
    line = [*lineage, *launches]
    while len(line) > KEPT:
        (_, before), (generation, step) = line[1:3]
        line[1:3] = [(generation, min(before, step))]
    return line


def is_ours(copy: StateCopy, lineage: Lineage, runs: Runs = UNKNOWN) -> bool:
    """Return whether a copy belongs to the line of the job.

    A copy of an earlier run belongs to it if this run was started from that run, the copy is a file, and no generation
    began before its step. A copy of the own run, or without a run's id, belongs to it if every later generation began
    at its step or later. A copy of a generation that was never launched is of another run of the name, and belongs to
    the line only at the step from which this run was started. A copy without a generation always belongs to the line.
    """
    if runs.own and copy.run not in {"", runs.own}:
        led_here = all(copy.completed_steps <= step for _, step in lineage)
        return copy.run in runs.origins and copy.tier not in MEMORY and led_here
    if copy.generation == 0 or not lineage:
        return True
    if copy.generation > lineage[-1][0]:
        first, origin = lineage[0]
        is_origin = first == 1 and 0 < origin == copy.completed_steps
        return is_origin and all(origin <= step for _, step in lineage)
    return all(copy.completed_steps <= step for generation, step in lineage if generation > copy.generation)


def usable(
    held: Iterable[StateCopy],
    lineage: Lineage,
    bad: Iterable[StateCopy] = (),
    runs: Runs = UNKNOWN,
    *,
    verified: Iterable[CopyToRestore] = (),
) -> list[StateCopy]:
    """Return the copies of the job's line; copies that failed since they were listed are marked as not valid.

    All of them are marked as copies of the job's own run, since the step from which the run was started has the same
    state in both runs.

    Args:
        held: The copies that the machines listed.
        lineage: The line of the job.
        bad: Copies that could not be used, with reasons; of several reasons the last counts.
        runs: The run of the job.
        verified: Copies whose contents were compared with their checksums since they were listed.
    """
    verified_keys = {copy.key for copy in verified}
    reasons = {copy.key: copy.reason for copy in bad}
    belongs: dict[tuple[str, int, int, bool], bool] = {}
    """A cache of ``is_ours``; its key is equal for all copies of a step of a generation."""
    ours = []
    for copy in held:
        group = (copy.run, copy.generation, copy.completed_steps, copy.tier in MEMORY)
        if group not in belongs:
            belongs[group] = is_ours(copy, lineage, runs)
        if belongs[group]:
            key = copy.key
            reason = reasons.get(key, reasons.get((*key[:-1], 0))) if reasons else None
            own = {"run": runs.own} if runs.own and copy.run != runs.own else {}
            failed = {} if reason is None else {"valid": False, "reason": reason}
            compared = {"verified": True} if key in verified_keys else {}
            changed = own | failed | compared
            ours.append(copy.model_copy(update=changed) if changed else copy)
    return ours


CORRUPT = "CorruptCheckpoint"
"""The end of the name of the exception that a rank raises if the state that it restores is damaged."""


def found_damaged(evidence: Evidence, resume_step: int) -> list[StateCopy]:
    """Return the own slots that are damaged, as the ranks that could not restore them reported when they ended.

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
            update={"valid": False, "reason": f"its rank could not restore it: {exceptions[copy.rank, copy.machine]}"}
        )
        for copy in evidence.held
        if copy.valid and copy.tier is Tier.OWN and copy.completed_steps == resume_step > 0
        if (copy.rank, copy.machine) in exceptions
    ]
