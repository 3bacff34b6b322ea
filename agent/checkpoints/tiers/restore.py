"""This module restores a rank's own slots from disk and remote storage, and verifies them from end to end."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from agent.checkpoints.options import FetchRange, Place, saves_of
from agent.checkpoints.peers.fetch import check_save
from agent.checkpoints.tiers.listing import roots_of
from agent.checkpoints.tiers.remote_folder import RemoteFolder
from agent.v1 import agent_pb2 as pb
from everstep.errors import CheckpointError, ConfigError, CorruptCheckpoint, EverstepError
from everstep.shards.file import ReadAt, open_shard, restore
from everstep.shards.folders import step_folder, step_name
from everstep.shards.manifest import (
    SHARED_BYTES,
    Manifest,
    Part,
    Piece,
    data_name,
    manifest_name,
    parse_manifest,
    read_summary,
)
from everstep.slots.file import SlotFile
from everstep.slots.format import own_slots
from everstep.system import private_files as private

T = TypeVar("T")

MERGED_BYTES = 1 << 20
"""If at most this many bytes lie between two parts of a remote file, one request reads both, since it costs less than
two requests."""


def restore_shard(
    place: Place, shard: pb.ShardSource, options: pb.CheckpointOptions, fenced: int, fetch: FetchRange
) -> int:
    """Fill the own slot file of ``shard.rank``; arguments, result and errors are those of ``JobTiers.restore``."""
    job, rank, step = shard.job or place.job, shard.rank, shard.completed_steps

    def fetch_tensors(view: memoryview) -> None:
        fetch(shard.tensors_address, place.job, shard.tensors_rank, step, view)

    fill = fetch_tensors if shard.HasField("tensors_rank") else None
    if shard.tier == pb.HeldCheckpoint.REMOTE:
        source = _from_remote(options.remote_url, job, rank, step, sparse=fill is not None)
    else:
        folders = [step_folder(root, job, step) for root in roots_of(place, options.disk_path)]
        source = _from_disk(_folder_of(folders, shard), shard)
    private.make_folder(place.shm)
    with source as (manifest, read):
        if manifest.step != step:
            raise CorruptCheckpoint(
                f"the copy of rank {rank} at step {step} holds the state after step {manifest.step}"
            )
        check_save(manifest.slot_header(), saves_of(shard), f"the file of rank {rank} on {shard.machine}")
        file = SlotFile(own_slots(place.shm, rank), slots=options.slots or 2, owner=place.owner(rank))
        with contextlib.closing(file) as slots:
            restore(manifest, read, slots, fill=fill, newest_generation=fenced)
    return manifest.slot_header().payload_bytes


def _folder_of(folders: list[Path], shard: pb.ShardSource) -> Path:
    """Return the folder that has the chosen save.

    If there is none, return a folder with any save of the rank; if there is none either, return the first folder.
    """
    there = [folder for folder in folders if (folder / manifest_name(shard.rank)).exists()]
    for folder in there:
        with contextlib.suppress(CheckpointError):
            if not (saves := saves_of(shard)) or read_summary(folder, shard.rank).saved_ns in saves:
                return folder
    return [*there, *folders][0]


@contextlib.contextmanager
def _from_disk(folder: Path, shard: pb.ShardSource) -> Iterator[tuple[Manifest, ReadAt]]:
    path = folder / manifest_name(shard.rank)
    try:
        text = path.read_bytes()
    except OSError as error:
        where = f" {shard.machine} may have it, on a disk that this machine does not see." if shard.address else ""
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror or error}.{where}") from error
    manifest = parse_manifest(text, str(path), shard.rank)
    with contextlib.ExitStack() as stack:
        try:
            read = stack.enter_context(open_shard(folder, shard.rank))
        except CheckpointError as error:
            raise CorruptCheckpoint(str(error)) from error
        yield manifest, _checked(read, folder / data_name(shard.rank))


def _checked(read: ReadAt, path: Path) -> ReadAt:
    """If the disk cannot read a part of a file, count this copy as lost, so that another copy is used."""

    def read_part(offset: int, buffer: memoryview) -> int:
        try:
            return read(offset, buffer)
        except OSError as error:
            if error.errno == errno.EIO:
                raise CorruptCheckpoint(f"{path} cannot be read at byte {offset}: {error.strerror}") from error
            raise

    return read_part


@contextlib.contextmanager
def _from_remote(url: str, job: str, rank: int, step: int, *, sparse: bool) -> Iterator[tuple[Manifest, ReadAt]]:
    """Return the manifest and a reader of a remote file; ``sparse``: large tensors are read from other ranks.

    Raises:
        ConfigError: no URL is configured, or its driver is missing.
        CorruptCheckpoint: the copy is missing or damaged.
        OSError: the copy cannot be read now.
    """
    if not url:
        raise ConfigError("a copy on remote storage was requested, but the job has no remote_url")
    folder = RemoteFolder(url, job)
    name = f"{step_name(step)}/{data_name(rank)}"
    manifest_at = f"{step_name(step)}/{manifest_name(rank)}"
    text = _now(f"{folder.url}/{manifest_at}", lambda: folder.read([manifest_at])).get(manifest_at)
    if text is None:
        raise CorruptCheckpoint(f"{folder.url}/{manifest_at} is gone")
    manifest = parse_manifest(text, f"{folder.url}/{manifest_at}", rank)
    if sparse:
        yield manifest, _Pieces(folder, name, manifest).read
        return
    with contextlib.ExitStack() as stack:
        read = _now(f"{folder.url}/{name}", lambda: stack.enter_context(folder.reading(name)))
        yield manifest, lambda offset, buffer: _now(f"{folder.url}/{name}", lambda: read(offset, buffer))


class _Pieces:
    """The parts of a remote file that no other rank can supply, all requested at once."""

    def __init__(self, folder: RemoteFolder, name: str, manifest: Manifest) -> None:
        pieces: list[Part | Piece] = [part for part in manifest.tensors if part.nbytes < SHARED_BYTES]
        pieces += [manifest.padding, manifest.structure]
        self._ranges = _merged([(piece.at, piece.at + piece.nbytes) for piece in pieces])
        self._data = _now(f"{folder.url}/{name}", lambda: folder.ranges(name, self._ranges))

    def read(self, offset: int, buffer: memoryview) -> int:
        for (begin, end), data in zip(self._ranges, self._data, strict=True):
            if begin <= offset < end:
                found = data[offset - begin : offset - begin + len(buffer)]
                buffer[: len(found)] = found
                return len(found)
        return 0


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(part for part in ranges if part[0] < part[1]):
        if found and begin - found[-1][1] <= MERGED_BYTES:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _now(place: str, work: Callable[[], T]) -> T:
    """Convert the driver's errors: if a file is missing, the copy is damaged; any other error may be temporary."""
    try:
        return work()
    except EverstepError:
        raise
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{place} is gone") from error
    except Exception as error:
        raise OSError(f"{place} cannot be read now: {error or type(error).__name__}") from error
