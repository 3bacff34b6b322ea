"""From what a new run of a job's name may start: what an earlier run of it left on disk and remote storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from everstep.decisions.keep.choose_restore import MEMORY, Restore, choose_restore, copy_of
from everstep.decisions.keep.lineage import Runs, usable
from everstep.errors import CheckpointError
from everstep.model.assignment import Assignment
from everstep.model.incident import StateCopy
from everstep.model.job_state import EarlierRun
from everstep.model.topology import Topology


def choose_start(
    held: Iterable[StateCopy],
    assignment: Assignment[str],
    earlier_run: EarlierRun,
    *,
    at: int | None = None,
    bad: Iterable[StateCopy] = (),
) -> tuple[Restore, list[str]]:
    """From which copies a new run starts; and the ids of the runs that saved them.

    What the last run took for its own goes before what still older runs left, which
    it did not go on from.

    Args:
        held: What the machines told of.
        assignment: Which machines, by name, are going to run its ranks.
        earlier_run: The last run of the name.
        at: The step to start from; None: the latest.
        bad: Copies that could not be used, with reasons.

    Raises:
        CheckpointError: not every rank can restore step ``at``; says which steps exist.
    """
    files = usable(left_by_earlier_run(held, assignment.topology, at), [], bad)
    older = [file for file in files if file.run != earlier_run.run]
    if earlier_run.run:
        theirs = Runs(earlier_run.run, tuple(earlier_run.origin_runs))
        chosen = _chosen(usable(files, earlier_run.lineage, runs=theirs), older, assignment, at)
    else:
        chosen = choose_restore(files, assignment, at=at)
    saved_by = {copy_of(file): file.run for file in files}
    return chosen, sorted({saved_by[copy] for copy in chosen.copies} - {""})


def _chosen(
    theirs: Iterable[StateCopy], older: Iterable[StateCopy], assignment: Assignment[str], at: int | None
) -> Restore:
    try:
        chosen = choose_restore(theirs, assignment, at=at)
    except CheckpointError:
        with contextlib.suppress(CheckpointError):
            return choose_restore(older, assignment, at=at)
        raise
    return chosen if chosen.step > 0 or at == 0 else choose_restore(older, assignment, at=at)


def left_by_earlier_run(held: Iterable[StateCopy], topology: Topology, at: int | None = None) -> list[StateCopy]:
    """The copies that may be chosen from.

    What is still in memory is none of them: an unclean end left it, and it is
    thrown away when the new run prepares its machines.

    Args:
        held: What the machines told of.
        topology: Of the new run.
        at: The step that it is to start from; None: not known yet.

    Raises:
        CheckpointError: the step was saved with other parallel sizes.
    """
    files = [copy for copy in held if copy.tier not in MEMORY]
    theirs = {copy.topology for copy in files if copy.completed_steps == at and copy.valid and copy.topology}
    alike = {text: topology.numbers_alike(text) for text in {copy.topology for copy in files}}
    fits = [copy for copy in files if not copy.topology or alike[copy.topology]]
    if theirs and not any(alike[text] for text in theirs):
        raise CheckpointError(
            f"step {at} was saved with the sizes {max(theirs)}, and the job has {topology} now (machines, ranks on "
            "each, then tp, pp, order or the axes). Start it with the sizes that it had, or give the step's folder on "
            "disk to --resume-path"
        )
    return fits
