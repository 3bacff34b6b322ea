"""This module lists the copies on disk and on remote storage, as the agent reports them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from agent.checkpoints.options import Place
from agent.checkpoints.tiers.opened_generation import OpenedGeneration
from agent.checkpoints.tiers.remote_folder import RemoteFolder
from agent.v1 import agent_pb2 as pb
from everstep.errors import CheckpointError
from everstep.shards.file import verify_shard
from everstep.shards.folders import ShardOnDisk, held_on_disk, step_name, step_of
from everstep.shards.manifest import Summary, data_name, manifest_name, parse_summary

UNFINISHED = "it has no manifest: its copy was cut short"
"""The reason why data on remote storage is not a valid copy: it is still being copied, or the job ended too early."""
ABANDONED = ".abandoned-g"
"""A part of the names of remote manifests that were set aside; the generation follows it."""
_FILE = re.compile(rf"rank-(\d+)\.(json|safetensors)({re.escape(ABANDONED)}\d+)?")


def root_of(place: Place, configured: str) -> Path:
    """Return the folder of the checkpoints of all jobs on this machine's disk."""
    return Path(configured) if configured else place.state_dir / "checkpoints"


def roots_of(place: Place, *configured: str) -> list[Path]:
    """Return the folders that may have checkpoints: current and former configured folders, then the agent's own."""
    return list(dict.fromkeys(root_of(place, path) for path in [*filter(None, configured), ""]))


def on_disk(
    roots: Iterable[Path], job: str, opened: OpenedGeneration | None, *, verify: bool
) -> list[pb.HeldCheckpoint]:
    """List the copies in the folders. A damaged copy is listed as invalid, with the reason; it raises no exception.

    Copies that the open generation abandons are left out: they are about to be set aside, or could not be set aside.
    """
    found = [shard for root in roots for shard in held_on_disk(root, job, verify=verify)]
    return [
        _message(shard, pb.HeldCheckpoint.DISK, str(shard.folder / data_name(shard.rank)))
        for shard in found
        if not (opened and shard.valid and opened.disowns(shard))
    ]


def on_remote(folder: RemoteFolder, opened: OpenedGeneration | None, *, verify: bool) -> list[pb.HeldCheckpoint]:
    """List the copies on remote storage, as ``on_disk`` does; raises the driver's error if it cannot be listed."""
    sizes = folder.sizes()
    found = []
    for step, files in steps_in(sizes).items():
        here = step_name(step)
        texts = folder.read(f"{here}/{manifest_name(rank)}" for rank, kinds in files.items() if "json" in kinds)
        for rank, kinds in sorted(files.items()):
            name = f"{here}/{manifest_name(rank)}"
            if "aside" in kinds and "json" not in kinds:
                continue
            copy = _held(folder, step, rank, texts.get(name), sizes=sizes, verify=verify)
            if not (opened and copy.valid and opened.disowns(copy)):
                found.append(_message(copy, pb.HeldCheckpoint.REMOTE, f"{folder.url}/{here}/{data_name(rank)}"))
    return found


def unlisted(url: str, error: Exception) -> pb.HeldCheckpoint:
    """Return an entry that says that remote storage could not be listed. It has the form of an invalid copy, and is
    equal on every machine.

    ``StateCopies.unlisted`` detects such an entry.
    """
    reason = f"{url} cannot be listed: {error or type(error).__name__}"
    return pb.HeldCheckpoint(rank=0, completed_steps=-1, reason=reason, tier=pb.HeldCheckpoint.REMOTE, place=url)


def unlisted_disk(place: Place, root: Path, error: Exception) -> pb.HeldCheckpoint:
    """Return an entry that says that a folder on disk could not be listed. It has the form of an invalid copy."""
    why = error.strerror if isinstance(error, OSError) else None
    reason = f"{root} cannot be listed: {why or error or type(error).__name__}"
    at = f"{place.machine}:{root}"  # each machine may have its own disk at this path
    return pb.HeldCheckpoint(rank=0, completed_steps=-1, reason=reason, tier=pb.HeldCheckpoint.DISK, place=at)


def check_listable(root: Path, job: str, *, must_exist: bool) -> None:
    """Raise the error that prevents the folders of a job from being listed.

    Args:
        root: Folder of the checkpoints of all jobs.
        job: Name of the job; a job without a folder has written nothing.
        must_exist: The root is configured: if it is missing, a disk is not mounted.

    Raises:
        OSError: the error of the file system.
    """
    if must_exist:
        root.stat()
    with contextlib.suppress(FileNotFoundError):  # the folder was never made, or a step is being deleted
        for folder in (root / job).iterdir():
            if step_of(folder) is not None:
                with contextlib.suppress(FileNotFoundError):
                    next(folder.iterdir(), None)


def steps_in(names: Iterable[str]) -> dict[int, dict[int, set[str]]]:
    """Return step → rank → kinds of files: ``json``, ``safetensors``, and ``aside`` for a manifest set aside."""
    found: dict[int, dict[int, set[str]]] = {}
    for name in names:
        path = PurePosixPath(name)
        step = step_of(Path(path.parent.name)) if len(path.parts) == 2 else None
        if step is not None and (match := _FILE.fullmatch(path.name)):
            found.setdefault(step, {}).setdefault(int(match[1]), set()).add("aside" if match[3] else match[2])
    return dict(sorted(found.items()))


def _held(
    folder: RemoteFolder, step: int, rank: int, text: bytes | None, *, sizes: Mapping[str, int], verify: bool
) -> ShardOnDisk:
    where = Path(step_name(step))
    if text is None:
        return ShardOnDisk(rank, step, where, False, UNFINISHED)
    try:
        manifest = parse_summary(text, f"{folder.url}/{where}/{manifest_name(rank)}", rank)
        reason = _fault(folder, manifest, step, sizes, verify)
    except CheckpointError as error:
        return ShardOnDisk(rank, step, where, False, str(error))
    fields = (manifest.generation, manifest.bytes, manifest.saved_ns, manifest.digest)
    origin = (manifest.run, manifest.topology, manifest.code_version)
    return ShardOnDisk(rank, step, where, not reason, reason, *fields, *origin)


def _fault(folder: RemoteFolder, manifest: Summary, step: int, sizes: Mapping[str, int], verify: bool) -> str:
    name = f"{step_name(step)}/{data_name(manifest.rank)}"
    place = f"{folder.url}/{name}"
    if manifest.step != step:
        return f"{place} holds the state after step {manifest.step}"
    if name not in sizes:
        return f"{place} is gone"
    if sizes[name] != manifest.bytes:
        return f"{place} has {sizes[name]} of {manifest.bytes} bytes"
    if not verify:
        return ""
    try:
        with folder.reading(name) as read:
            fault = verify_shard(manifest, read)
    except Exception as error:  # a driver may raise anything
        fault = f"it cannot be read: {error}"
    return f"{place}: {fault}" if fault else ""


def _message(shard: ShardOnDisk, tier: pb.HeldCheckpoint.Tier.ValueType, place: str) -> pb.HeldCheckpoint:
    return pb.HeldCheckpoint(
        rank=shard.rank,
        completed_steps=shard.completed_steps,
        bytes=shard.bytes,
        valid=shard.valid,
        reason=shard.reason,
        tier=tier,
        generation=shard.generation,
        saved_ns=shard.saved_ns,
        digest=shard.digest,
        place=place,
        run=shard.run,
        topology=shard.topology,
        version=shard.code_version,
    )
