"""This module rotates, reads and follows the log files with the captured output of ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

from agent.state.reads import Reads
from agent.v1 import agent_pb2 as pb
from everstep.system import private_files as private

Stream: TypeAlias = "pb.ReadLogRequest.Stream.ValueType"

SEARCHED_BYTES = 256 * 1024
"""A traceback is searched for in this many bytes at the end of a log."""
CHUNK = 64 * 1024
POLL_S = 0.1


def rotate(path: Path, max_bytes: int, backups: int) -> bool:
    """Move the contents of a full log to ``<name>.1``, after renaming earlier backups; returns whether it was full.

    The rank keeps the file open for appending, so the file itself stays and is emptied. Output that the rank writes
    in the microseconds between the last copy and the emptying is lost.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    for number in range(backups - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            _backup(path, number).rename(_backup(path, number + 1))
    with path.open("rb") as source, open(_backup(path, 1), "wb", opener=private.open_file) as target:
        shutil.copyfileobj(source, target)
        while rest := source.read(CHUNK):
            target.write(rest)
        os.truncate(path, 0)
    return True


def _backup(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def kept_files(path: Path) -> list[Path]:
    """Return the files of a log with its backups, oldest first."""
    backups = sorted(path.parent.glob(f"{path.name}.*"), key=lambda p: -int(p.suffix[1:]))
    return [*backups, path] if path.exists() else backups


def tail(path: Path, size: int) -> bytes:
    """Return the last bytes of a log, backups included."""
    found = b""
    for part in reversed(kept_files(path)):
        with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - (size - len(found))))
            found = file.read() + found
        if len(found) >= size:
            break
    return found[-size:] if size else b""


async def read_log(
    files: dict[pb.ReadLogRequest.Stream.ValueType, Path], tail_bytes: int, follow: bool, reads: Reads
) -> AsyncIterator[pb.LogChunk]:
    """Yield the contents of logs.

    Args:
        files: Stream → its log.
        tail_bytes: Only the last bytes of each log are read; 0: the log is read from its beginning.
        follow: Continue with the output that is added later; endless.
        reads: Reads the files.
    """
    positions: dict[Stream, tuple[int, int]] = {}
    for stream, path in files.items():
        data, positions[stream] = await reads.do(partial(_first, path, tail_bytes))
        for at in range(0, len(data), CHUNK):
            yield pb.LogChunk(data=data[at : at + CHUNK], stream=stream)
    while follow:
        await asyncio.sleep(POLL_S)
        for stream, path in files.items():
            added, positions[stream] = await reads.do(partial(_added, path, *positions[stream]))
            for at in range(0, len(added), CHUNK):
                yield pb.LogChunk(data=added[at : at + CHUNK], stream=stream)


def _first(path: Path, tail_bytes: int) -> tuple[bytes, tuple[int, int]]:
    """Return the last bytes of a log (0: all of it), and the offset and the rotation up to which it was read."""
    size = path.stat().st_size if path.exists() else 0
    position = (size, _rotation(path))
    older = sum(p.stat().st_size for p in kept_files(path) if p != path)
    return tail(path, min(tail_bytes or older + size, older + size)), position


def _rotation(path: Path) -> int:
    """Return the time of a log's newest backup, nanoseconds. This time changes when the log is rotated."""
    try:
        return _backup(path, 1).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _added(path: Path, offset: int, rotation: int) -> tuple[bytes, tuple[int, int]]:
    """Return the output that was added after an earlier read, and the new offset and rotation."""
    data = b""
    if (now := _rotation(path)) != rotation:  # the rest of the output is in the backup now
        data, offset = _from(_backup(path, 1), offset), 0
    added = _from(path, offset)
    return data + added, (offset + len(added), now)


def _from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""
