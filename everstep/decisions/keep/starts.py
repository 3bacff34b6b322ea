"""Chooses the copies from which a job starts: the folder of a disk checkpoint, or copies of earlier runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from everstep.base.text import listed
from everstep.decisions.keep.choose_restore import MEMORY, Restore, choose_restore
from everstep.decisions.keep.lineage import Runs, split, usable
from everstep.errors import CheckpointError
from everstep.model.job_state import EarlierRun
from everstep.model.machine import Assignment
from everstep.model.state_copy import StateCopies
from everstep.model.topology import Topology
from everstep.shards.manifest import data_name, manifest_name

NAMED = 8
"""The number of ranks that a message names; the rest is counted."""
STEP = re.compile(r"step-([0-9]{9,})")


@dataclass(frozen=True, slots=True)
class Folder:
    """The parts of a folder's path: ``<root>/<job>/step-<number>``."""

    root: str
    job: str
    step: int


def folder_of(path: str) -> Folder | None:
    """Return the parts of a checkpoint's path; None: it is not the path of a checkpoint."""
    pure = PurePosixPath(path)
    match = STEP.fullmatch(pure.name)
    if not pure.is_absolute() or len(pure.parts) < 3 or match is None:
        return None
    return Folder(root=str(pure.parent.parent), job=pure.parent.name, step=int(match[1]))


def judge_folder(
    path: str, seen: Mapping[str, Mapping[int, str]], saved_by: Mapping[int, tuple[str, str]] | None = None
) -> str:
    """Return why a job cannot start from the folder; empty: it can start from it.

    Args:
        path: The folder.
        seen: Machine of the job → rank that it sees in the folder → the problem of its files; empty: there is none.
        saved_by: Rank → run and topology of the job that saved its files; empty: not known. The topology gives the
            number of ranks that the checkpoint must have, which may differ from the job that starts.
    """
    seen_ranks = {rank for ranks in seen.values() for rank in ranks}
    if not seen_ranks:
        return f"no machine sees a checkpoint in {path}"
    for machine, ranks in seen.items():
        for rank, problem in sorted(ranks.items()):
            if problem:
                return f"{path} is damaged, as seen by {machine}: rank {rank}: {problem}"
        if len(ranks) < len(seen_ranks):
            return (
                f"{machine} sees {len(ranks)} of the {len(seen_ranks)} ranks in {path}: "
                "the folder must be on a file system that all machines share"
            )
    for name, which in (("run", 0), ("sizes", 1)):
        ranks_by_value = {
            job[which]: rank for rank, job in sorted((saved_by or {}).items(), reverse=True) if job[which]
        }
        if len(ranks_by_value) > 1:
            (value, first), (other, second) = sorted(ranks_by_value.items(), key=lambda item: item[1])[:2]
            return f"{path} has files of two jobs: rank {first} is of {name} {value}, rank {second} of {other}"
    sizes = next((topology for _, topology in (saved_by or {}).values() if topology), "")
    count = Topology.parse(sizes).world_size if sizes else max(seen_ranks) + 1
    lacking = [rank for rank in range(count) if rank not in seen_ranks]
    if not lacking:
        return ""
    return (
        f"{path} is not complete: of {count} ranks it lacks rank {listed(lacking, NAMED)}. Copy their files "
        f"({data_name(lacking[0])}, {manifest_name(lacking[0])}, …) from the machines that wrote them"
    )


def choose_start(
    held: Iterable[StateCopies],
    assignment: Assignment[str],
    earlier_run: EarlierRun,
    *,
    at: int | None = None,
    bad: Sequence[StateCopies] = (),
) -> tuple[Restore, list[str]]:
    """Choose the copies from which a new run starts; return them with the ids of the runs that saved them.

    Copies of the last run's line are preferred to copies of older runs that do not belong to that line.

    Args:
        held: The copies that the machines reported.
        assignment: The machines, by name, that will run the job's ranks.
        earlier_run: The last run of the name.
        at: The step to start from; None: the latest.
        bad: Copies that could not be used, with reasons.

    Raises:
        CheckpointError: Not every rank can restore step ``at``; the message names the steps that exist.
    """
    files = usable(left_by_earlier_run(held, assignment.topology, at), [], bad)
    older = [file for file in files if file.run != earlier_run.run]
    if earlier_run.run:
        runs = Runs(earlier_run.run, tuple(earlier_run.origin_runs))
        chosen = _chosen(usable(files, earlier_run.lineage, runs=runs), older, assignment, at)
    else:
        chosen = choose_restore(files, assignment, at=at)
    saved_by = {file.run for file in files for copies in chosen.copies if split(file, copies)[0].places}
    return chosen, sorted(saved_by - {""})


def _chosen(
    preferred: Iterable[StateCopies], older: Iterable[StateCopies], assignment: Assignment[str], at: int | None
) -> Restore:
    try:
        chosen = choose_restore(preferred, assignment, at=at)
    except CheckpointError:
        with contextlib.suppress(CheckpointError):
            return choose_restore(older, assignment, at=at)
        raise
    return chosen if chosen.step > 0 or at == 0 else choose_restore(older, assignment, at=at)


def left_by_earlier_run(held: Iterable[StateCopies], topology: Topology, at: int | None = None) -> list[StateCopies]:
    """Return the copies of earlier runs from which a new run may start.

    Copies in memory are left out: they remain only if the earlier run did not end properly, and the new run deletes
    them when it prepares its machines.

    Args:
        held: The copies that the machines reported.
        topology: The topology of the new run.
        at: The step from which the new run is to start; None: not known yet.

    Raises:
        CheckpointError: the step was saved with other parallel sizes.
    """
    files = [copy for copy in held if copy.tier not in MEMORY]
    saved_with = {copy.topology for copy in files if copy.completed_steps == at and copy.valid and copy.topology}
    alike = {text: topology.same_numbering(text) for text in {copy.topology for copy in files}}
    fits = [copy for copy in files if not copy.topology or alike[copy.topology]]
    if saved_with and not any(alike[text] for text in saved_with):
        raise CheckpointError(
            f"step {at} was saved with the sizes {max(saved_with)}, and the job has {topology} now (machines, ranks on "
            "each, then tp, pp, order or the axes). Start the job with the earlier sizes, or give the step's folder on "
            "disk to --resume-path"
        )
    return fits
