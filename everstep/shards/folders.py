"""Lists the copies in the folders of a job's checkpoints on disk, deletes the folders or sets them aside.

::

    <root>/<job>/step-000000120/rank-3.safetensors, rank-3.json, …
    <root>/<job>/abandoned-g4-step-000000140/…

Several machines may share the root; then each of them sees all files.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import CheckpointError
from everstep.model.run_id import is_older
from everstep.shards.atomic_output import sync_folder
from everstep.shards.file import open_shard, verify_shard
from everstep.shards.manifest import Manifest, Summary, data_name, read_manifest, read_summary

_STEP = re.compile(r"step-(\d{9,18})")
_ABANDONED = re.compile(r"abandoned-g\d+-step-(\d{9,18})")
_DELETED = ".deleted"
_RANK = re.compile(r"rank-(\d+)\.(?:json|safetensors)")


@dataclass(frozen=True, slots=True)
class ShardOnDisk:
    """The copy of a rank's state in a folder."""

    rank: int
    completed_steps: int
    folder: Path
    """The ``step-…`` folder."""
    valid: bool
    reason: str = ""
    """Why the shard is not valid; empty: it is valid."""
    generation: int = 0
    """Generation of the job that saved the copy."""
    bytes: int = 0
    saved_ns: int = 0
    digest: str = ""
    """Digest of the copy's tensors (``Summary.digest``)."""
    run: str = ""
    topology: str = ""
    code_version: int = 0
    """Number of the version of the job's code that saved the copy; 0: not known."""


def step_name(step: int) -> str:
    """Name of the folder of a step, on disk and on remote storage."""
    return f"step-{step:09d}"


def step_folder(root: Path, job: str, step: int) -> Path:
    """The folder of the state after a number of completed steps."""
    return root / job / step_name(step)


def step_of(folder: Path) -> int | None:
    """Completed steps of the checkpoint in a folder, by the folder's name; None: it is not a folder of a checkpoint."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_folders(root: Path, job: str) -> dict[int, Path]:
    """The folders of a job by step, ascending; empty: none exists."""
    with contextlib.suppress(OSError):
        folders = {step: path for path in (root / job).iterdir() if (step := step_of(path)) is not None}
        return dict(sorted(folders.items()))
    return {}


def manifests(folder: Path) -> dict[int, Manifest]:
    """The manifests in a ``step-…`` folder by rank; damaged ones are left out."""
    by_rank = {}
    for rank in _ranks(folder):
        with contextlib.suppress(CheckpointError):
            by_rank[rank] = read_manifest(folder, rank)
    return by_rank


def held_on_disk(
    root: Path, job: str, *, ranks: Collection[int] | None = None, verify: bool = False
) -> list[ShardOnDisk]:
    """All copies of a job, by step and rank. A damaged copy is listed with its reason; it raises no error.

    Args:
        root: The folder of all jobs.
        job: Name of the job.
        ranks: Only these ranks; None: all ranks.
        verify: True: read all data and compare checksums. False: check only manifests and sizes.
    """
    return [
        held_in(folder, step, rank, verify=verify)
        for step, folder in step_folders(root, job).items()
        for rank in _ranks(folder)
        if ranks is None or rank in ranks
    ]


def held_in(folder: Path, step: int, rank: int, *, verify: bool = False) -> ShardOnDisk:
    """The copy of a rank's state in a folder."""
    try:
        manifest = read_summary(folder, rank)
        reason = _fault(folder, manifest, step, verify=verify)
    except CheckpointError as error:
        return ShardOnDisk(rank, step, folder, False, str(error))
    except OSError as error:
        reason = f"{folder / data_name(rank)} cannot be read: {error.strerror or error}"
    return ShardOnDisk(
        rank,
        step,
        folder,
        not reason,
        reason,
        manifest.generation,
        manifest.bytes,
        manifest.saved_ns,
        manifest.digest,
        manifest.run,
        manifest.topology,
        manifest.code_version,
    )


def complete_steps(root: Path, job: str, ranks: Collection[int], *, run: str = "") -> list[int]:
    """The steps for which all of ``ranks`` have valid copies, ascending.

    Args:
        root: The folder of all jobs.
        job: Name of the job.
        ranks: The ranks; if there are none, no step is complete.
        run: Copies of other runs than this one do not count; empty: copies of all runs count.
    """
    return [
        step
        for step, folder in step_folders(root, job).items()
        if ranks and all(_counts(held_in(folder, step, rank), run) for rank in sorted(ranks))
    ]


def prune(root: Path, job: str, steps: Collection[int], *, run: str = "") -> list[int]:
    """Delete steps with the files of all ranks, and the remains of steps that a killed agent did not delete completely.

    Args:
        root: The folder of all jobs.
        job: Name of the job.
        steps: The steps to delete.
        run: Id of the run that calls. Steps of a newer run are not deleted: its ranks may run and share the folder.

    Returns:
        The steps that were deleted.
    """
    for left in (root / job).glob(f"*{_DELETED}"):
        shutil.rmtree(left, ignore_errors=True)
    folders = step_folders(root, job)
    old = [step for step in sorted(folders.keys() & set(steps)) if not _is_newer(folders[step], step, run)]
    for step in old:
        _delete(folders[step])
    return old


def set_aside(
    root: Path,
    job: str,
    after_step: int,
    generation: int,
    *,
    keep: int = 1,
    abandoned: Callable[[Manifest], bool] | None = None,
) -> list[int]:
    """Rename the folders of steps that a job abandons, because it resumes from an earlier step.

    The new names are ``abandoned-g<generation>-step-…``; the newest ``keep`` of these folders are kept.

    Args:
        root: The folder of all jobs.
        job: Name of the job.
        after_step: The step from which the job resumes.
        generation: The generation that resumes. Its own later steps stay, in case this is called again.
        keep: Number of folders of abandoned steps to keep.
        abandoned: Decides from a file's manifest whether the file is abandoned; None: files of older generations are.

    Returns:
        The steps that were set aside.

    Raises:
        CheckpointError: a folder cannot be renamed.
    """
    judge = abandoned or (lambda manifest: manifest.generation < generation)
    renamed = []
    for step, folder in step_folders(root, job).items():
        if step > after_step and any(judge(manifest) for manifest in manifests(folder).values()):
            target = folder.with_name(f"abandoned-g{generation}-{folder.name}")
            try:
                _rename(folder, target)
                sync_folder(folder.parent)
            except FileNotFoundError:
                continue  # another machine on the same disk was faster
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be set aside: {error.strerror or error}") from error
            renamed.append(step)
    aside = []
    with contextlib.suppress(OSError):
        for path in (root / job).iterdir():
            if match := _ABANDONED.fullmatch(path.name):
                aside.append((path.stat().st_ctime_ns, int(match[1]), path))
    for _, _, path in sorted(aside)[: -keep or None]:
        _delete(path)
    return renamed


def _counts(shard: ShardOnDisk, run: str) -> bool:
    return shard.valid and (not run or shard.run in {"", run})


def _is_newer(folder: Path, step: int, run: str) -> bool:
    """Whether a newer run has files in a folder."""
    return any(is_older(run, held_in(folder, step, rank).run) for rank in _ranks(folder))


def _ranks(folder: Path) -> list[int]:
    """The ranks that have a manifest or a data file in a folder."""
    with contextlib.suppress(OSError):
        return sorted({int(match[1]) for path in folder.iterdir() if (match := _RANK.fullmatch(path.name))})
    return []


def _fault(folder: Path, manifest: Summary, step: int, *, verify: bool) -> str:
    """How a rank's file is damaged; empty: it is intact."""
    path = folder / data_name(manifest.rank)
    if manifest.step != step:
        return f"{path} holds the state after step {manifest.step}"
    size = path.stat().st_size
    if size != manifest.bytes:
        return f"{path} has {size} of {manifest.bytes} bytes"
    if not verify:
        return ""
    with open_shard(folder, manifest.rank) as read:
        reason = verify_shard(manifest, read)
    return f"{path}: {reason}" if reason else ""


def _rename(folder: Path, target: Path) -> None:
    """Rename a folder; an older folder of that name is replaced only once the new one is ready."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        _delete(target)
        folder.rename(target)


def _delete(folder: Path) -> None:
    # The folder is renamed first: after a kill, half of a checkpoint must not have the name of a checkpoint.
    gone = folder.with_name(folder.name + _DELETED)
    with contextlib.suppress(OSError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
