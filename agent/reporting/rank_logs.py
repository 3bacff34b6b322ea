"""The captured output of ranks: its rotation by size, its reading, and the exception in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

from agent.state.reads import Reads
from agent.v1 import agent_pb2 as pb
from everstep.system import private_files as private

Stream: TypeAlias = "pb.ReadLogRequest.Stream.ValueType"

TAIL_BYTES = 4096
SEARCHED_BYTES = 256 * 1024
"""How far back a traceback is looked for."""
CHUNK = 64 * 1024
POLL_S = 0.1

_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""torch.distributed's excepthook puts it before every line."""
_HEADER = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_NAMED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)(: .*)?$")
_MARKER = re.compile(rb"^--- everstep: rank \d+, generation (\d+),.*\n?", re.MULTILINE)


def rotate(path: Path, max_bytes: int, backups: int) -> bool:
    """Move the contents of a full log to ``<name>.1`` … and empty it.

    The rank keeps the file open for appending, so the file itself stays.
    What is written between the last copy and the cut is lost: microseconds.
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


def of_generation(text: bytes, generation: int) -> bytes:
    """Return the part of a stderr that a generation wrote."""
    marks = list(_MARKER.finditer(text))
    for number, mark in enumerate(marks):
        if int(mark[1]) == generation:
            end = marks[number + 1].start() if number + 1 < len(marks) else len(text)
            return text[mark.end() : end]
    # The marker was rotated away or is further back: all of the text, unless another marker is in it.
    return b"" if marks else text


def exception_in(text: bytes) -> str:
    """The line that names the exception of the last traceback, e.g. ``ValueError: bad``; else empty.

    A message that begins on the line after its exception's name counts from there.
    """
    lines = [_PREFIX.sub("", line) for line in text.decode(errors="replace").splitlines()]
    headers = [number for number, line in enumerate(lines) if line.strip() == _HEADER]
    if headers:
        raised = (at for at in range(headers[-1] + 1, len(lines)) if _RAISED.match(lines[at]))
    else:
        # Python prints no header when there is no frame to show: a script that is missing or is not Python.
        raised = (at for at in reversed(range(len(lines))) if _NAMED.match(lines[at]))
    if (at := next(raised, None)) is None:
        return ""
    line = lines[at].rstrip()
    if line.endswith(":"):
        line = f"{line} {next((more.strip() for more in lines[at + 1 :] if more.strip()), '')}".rstrip()
    return line[:500]


async def read_log(
    files: dict[pb.ReadLogRequest.Stream.ValueType, Path], tail_bytes: int, follow: bool, reads: Reads
) -> AsyncIterator[pb.LogChunk]:
    """The logs by stream, from the beginning or the tail; then, with ``follow``, what is added."""
    places: dict[Stream, tuple[int, int]] = {}
    for stream, path in files.items():
        data, places[stream] = await reads.do(partial(_first, path, tail_bytes))
        for at in range(0, len(data), CHUNK):
            yield pb.LogChunk(data=data[at : at + CHUNK], stream=stream)
    while follow:
        await asyncio.sleep(POLL_S)
        for stream, path in files.items():
            added, places[stream] = await reads.do(partial(_added, path, *places[stream]))
            for at in range(0, len(added), CHUNK):
                yield pb.LogChunk(data=added[at : at + CHUNK], stream=stream)


def _first(path: Path, tail_bytes: int) -> tuple[bytes, tuple[int, int]]:
    """The end of a log, or all of it, and the place after it."""
    size = path.stat().st_size if path.exists() else 0
    place = (size, _rotation(path))
    older = sum(p.stat().st_size for p in kept_files(path) if p != path)
    return tail(path, min(tail_bytes or older + size, older + size)), place


def _rotation(path: Path) -> int:
    """Changes when a log is rotated: the time of its newest backup, ns."""
    try:
        return _backup(path, 1).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _added(path: Path, offset: int, rotation: int) -> tuple[bytes, tuple[int, int]]:
    """What was written behind a place in a log, and the place after it."""
    data = b""
    if (now := _rotation(path)) != rotation:  # the rest lies in the backup
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
