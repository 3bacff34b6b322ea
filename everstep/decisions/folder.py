"""Starting from the folder of one disk checkpoint, saved with any parallel sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

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


def judge_folder(path: str, seen: Mapping[str, Mapping[int, str]]) -> str:
    """Why a job cannot start from the folder; empty when it can.

    Which ranks it must hold is not known here, since it may have been saved with
    other sizes: the ranks find out when they read it.

    Args:
        path: The folder.
        seen: Of each machine of the job: the ranks that it sees in the folder, each with what is wrong with its files,
            empty when nothing is.
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
    lacking = next((rank for rank in range(max(everything)) if rank not in everything), None)
    return "" if lacking is None else f"{path} is not complete: it has rank {max(everything)} and lacks rank {lacking}"
