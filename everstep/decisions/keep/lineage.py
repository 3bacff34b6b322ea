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

from everstep.decisions.keep.choose_restore import MEMORY, at_home
from everstep.model.evidence import Evidence
from everstep.model.machine import Assignment
from everstep.model.places import NOWHERE
from everstep.model.state_copy import StateCopies, Tier

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


def is_ours(copies: StateCopies, lineage: Lineage, runs: Runs = UNKNOWN) -> bool:
    """Return whether copies belong to the line of the job.

    A copy of an earlier run belongs to it if this run was started from that run, the copy is a file, and no generation
    began before its step. A copy of the own run, or without a run's id, belongs to it if every later generation began
    at its step or later. A copy of a generation that was never launched is of another run of the name, and belongs to
    the line only at the step from which this run was started. A copy without a generation always belongs to the line.
    """
    completed = copies.completed_steps
    if runs.own and copies.run not in {"", runs.own}:
        led_here = all(completed <= step for _, step in lineage)
        return copies.run in runs.origins and copies.tier not in MEMORY and led_here
    if copies.generation == 0 or not lineage:
        return True
    if copies.generation > lineage[-1][0]:
        first, origin = lineage[0]
        is_origin = first == 1 and 0 < origin == completed
        return is_origin and all(origin <= step for _, step in lineage)
    return all(completed <= step for generation, step in lineage if generation > copies.generation)


def usable(
    held: Iterable[StateCopies],
    lineage: Lineage,
    bad: Sequence[StateCopies] = (),
    runs: Runs = UNKNOWN,
    *,
    verified: Sequence[StateCopies] = (),
) -> list[StateCopies]:
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
    ours: list[StateCopies] = []
    for copies in held:
        if not is_ours(copies, lineage, runs):
            continue
        left = copies.changed(run=runs.own) if runs.own and copies.run != runs.own else copies
        for failed in reversed(bad):
            parted, left = split(left, failed)
            if parted.places:
                ours.append(parted.changed(valid=False, reason=failed.reason))
        for compared in verified if left.valid and not left.verified else ():
            parted, left = split(left, compared)
            if parted.places:
                ours.append(parted.changed(verified=True))
        if left.places:
            ours.append(left)
    return ours


def split(copies: StateCopies, others: StateCopies) -> tuple[StateCopies, StateCopies]:
    """Return those of the copies that are among others, and the rest of them."""
    places = copies.places & others.places if copies.same_save(others) else NOWHERE
    return copies.at(places), copies.at(copies.places - places) if places else copies


CORRUPT = "CorruptCheckpoint"
"""The end of the name of the exception that a rank raises if the state that it restores is damaged."""


def found_damaged(evidence: Evidence, resume_step: int, assignment: Assignment[str]) -> list[StateCopies]:
    """Return the own slots that are damaged, as the ranks that could not restore them reported when they ended.

    Args:
        evidence: The evidence of the stop of the generation that restored.
        resume_step: The step at which that generation began.
        assignment: The machines, by name, that ran the ranks.
    """
    own = [
        at_home(copies, assignment)
        for copies in evidence.held
        if copies.valid and copies.tier is Tier.OWN and copies.completed_steps == resume_step > 0
    ]
    return [
        damaged.changed(valid=False, reason=f"its rank could not restore it: {end.exception}")
        for end in evidence.exits
        if not end.stopped_by_us and end.exception.split(":")[0].endswith(CORRUPT)
        for copies in own
        if (damaged := copies.among(end.ranks)).places
    ]
