"""Starting from the folder of one disk checkpoint, saved with any parallel sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from everstep.base.text import listed
from everstep.model.topology import Topology
from everstep.shards.manifest import data_name, manifest_name

NAMED = 8
"""Ranks that a message names; the others are counted."""
STEP = re.compile(r"step-([0-9]{9,})")


@dataclass(frozen=True, slots=True)
class Folder:
    """``<root>/<job>/step-<number>``, taken apart."""

    root: str
    job: str
    step: int


def folder_of(path: str) -> Folder | None:
    """The parts of such a path; None when it is none."""
    pure = PurePosixPath(path)
    match = STEP.fullmatch(pure.name)
    if not pure.is_absolute() or len(pure.parts) < 3 or match is None:
        return None
    return Folder(root=str(pure.parent.parent), job=pure.parent.name, step=int(match[1]))


def judge_folder(
    path: str, seen: Mapping[str, Mapping[int, str]], saved_by: Mapping[int, tuple[str, str]] | None = None
) -> str:
    """Why a job cannot start from the folder; empty when it can.

    Args:
        path: The folder.
        seen: Of each machine of the job: the ranks that it sees in the folder, each with what is wrong with its files,
            empty when nothing is.
        saved_by: Rank → run and topology of the job that saved its files, each empty where the files do not say it. The
            sizes need not be those of the job that starts, and say how many ranks there have to be.
    """
    everything = {rank for ranks in seen.values() for rank in ranks}
    if not everything:
        return f"no machine sees a checkpoint in {path}"
    for machine, ranks in seen.items():
        for rank, problem in sorted(ranks.items()):
            if problem:
                return f"{machine} finds {path} damaged: rank {rank}: {problem}"
        if len(ranks) < len(everything):
            return (
                f"{machine} sees {len(ranks)} of the {len(everything)} ranks in {path}: "
                "the folder must be on a file system that all machines share"
            )
    for name, which in (("run", 0), ("sizes", 1)):
        ranks_by_value = {
            job[which]: rank for rank, job in sorted((saved_by or {}).items(), reverse=True) if job[which]
        }
        if len(ranks_by_value) > 1:
            (value, first), (other, second) = sorted(ranks_by_value.items(), key=lambda item: item[1])[:2]
            return f"{path} is no checkpoint of one job: rank {first} is of {name} {value}, rank {second} of {other}"
    sizes = next((topology for _, topology in (saved_by or {}).values() if topology), "")
    count = Topology.parse(sizes).world_size if sizes else max(everything) + 1
    lacking = [rank for rank in range(count) if rank not in everything]
    if not lacking:
        return ""
    return (
        f"{path} is not complete: of {count} ranks it lacks rank {listed(lacking, NAMED)}. Bring "
        f"{data_name(lacking[0])} and {manifest_name(lacking[0])}, and those of the others, from the "
        "machines that wrote them"
    )
