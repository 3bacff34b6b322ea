"""This module accesses a folder on a file system or an object store, which an fsspec URL names.

Examples are ``s3://bucket/runs`` and ``file:///mnt/nfs/runs``. The module hides a difference between the two kinds of
storage. A file system shows incomplete files, so each file is written under a temporary name and then moved. An object
store shows only complete objects, and a move would copy the object.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from everstep.errors import ConfigError
from everstep.shards.file import Pace, ReadAt

PART = ".part"
"""The end of the names of incomplete files."""
_MOVES = {"file", "local", "sftp", "ssh", "smb", "hdfs", "arrow_hdfs", "memory"}
"""Protocols of file systems, where a move is a rename."""
_COPY_BYTES = 8 << 20
_READ_AHEAD = 32 << 20
"""The size of one request when a complete file is read, bytes; a request to an object store takes tens of ms."""


class RemoteFolder:
    """The files of one job below a URL; names are relative, with ``/``.

    Any call may raise OSError or an error of the driver: callers treat every exception as "not now".

    Args:
        url: ``CheckpointPolicy.remote_url``.
        job: The job's name, the folder below it.
        setting: Name of the setting that contains the URL, for messages.

    Raises:
        ConfigError: the URL's protocol is unknown, or its driver is not installed.
    """

    def __init__(self, url: str, job: str, setting: str = "remote_url") -> None:
        from fsspec.core import url_to_fs

        self.url = f"{url.rstrip('/')}/{job}"
        try:
            files, root = url_to_fs(self.url)
        except ImportError as error:
            raise ConfigError(
                f"{setting} {url} needs a driver that is not installed where it is used: {error}"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{setting} {url} cannot be used: {error}. Give an fsspec URL such as s3://bucket/runs or file:///mnt/runs"
            ) from error
        self._files: Any = files
        self._root = str(root).rstrip("/")
        protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
        self._moves = bool(protocols & _MOVES)

    def sizes(self) -> dict[str, int]:
        """Return every complete file with its size in bytes; empty if the job has no folder yet.

        Raises:
            FileNotFoundError: the bucket does not exist.
        """
        return {name: int(info["size"]) for name, info in self._found().items()}

    def put(self, local: Path, name: str, pace: Pace) -> None:
        """Copy a file to the folder; only the complete file becomes visible.

        Args:
            local: The local file.
            name: Its name in the folder.
            pace: Called with the bytes of each piece; raises to give up.
        """
        if not self._moves:  # an object store has no folders, and makedirs would make a bucket of a mistyped name
            self._files.put_file(str(local), self._at(name), callback=_callback(pace))
            return
        self._moved_to(self._at(name), lambda temporary: self._copy(local, temporary, pace))

    def write(self, data: bytes, name: str) -> None:
        """Write a small file; only the complete file becomes visible."""
        if not self._moves:
            self._files.pipe_file(self._at(name), data)
            return
        self._moved_to(self._at(name), lambda temporary: self._files.pipe_file(temporary, data))

    def ages(self, now_s: float) -> dict[str, float]:
        """Return every complete file with the seconds since it was written; 0 if its driver does not report the time.

        Raises:
            FileNotFoundError: the bucket does not exist.
        """
        return {name: _age(info, now_s) for name, info in self._found().items()}

    def _moved_to(self, target: str, write: Callable[[str], None]) -> None:
        """Write a file under a temporary name, then move it to its own name."""
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        temporary = f"{target}.{uuid.uuid4().hex[:8]}{PART}"
        try:
            write(temporary)
            self._files.mv(temporary, target)
        except BaseException:
            with contextlib.suppress(Exception):
                self._files.rm_file(temporary)
            raise

    def probe(self, name: str) -> None:
        """Write a small file beside the job's files, and remove it; raises the driver's errors.

        On a file system, the file is written beside the job's folder, because that folder may not exist yet. On an
        object store, it is written in the folder, because permissions may cover only names that begin with the
        folder's name.

        Raises:
            FileNotFoundError: the folder of the file system, or the bucket, does not exist.
        """
        folder = self._root.rpartition("/")[0] if self._moves else self._root
        place = f"{folder}/{name}{PART}"
        self._files.pipe_file(place, b"everstep")
        self._files.rm_file(place)

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of small files, read in parallel; missing files are left out.

        A file that cannot be read for another reason is not missing: the error is raised.
        """
        places = {self._at(name): name for name in names}
        if not places:
            return {}
        read = {}
        for place, data in self._files.cat(list(places), on_error="return").items():
            if isinstance(data, BaseException):
                if not isinstance(data, FileNotFoundError):
                    raise data
                continue
            read[places[place]] = bytes(data)
        return read

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[ReadAt]:
        """Return ``read(offset, buffer)`` of a file that is read from its beginning to its end."""
        self._files.invalidate_cache()  # a driver may take the file's size and tag from an old listing
        with self._files.open(self._at(name), "rb", block_size=_READ_AHEAD) as file:

            def read(offset: int, buffer: memoryview) -> int:
                file.seek(offset)
                return int(file.readinto(buffer))

            yield read

    def ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read parts of a file in parallel, (begin, end) each."""
        path = self._at(name)
        begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
        return [bytes(data) for data in self._files.cat_ranges([path] * len(ranges), begins, ends, on_error="raise")]

    def move(self, name: str, to: str) -> None:
        """Rename a small file."""
        self._files.mv(self._at(name), self._at(to))

    def remove(self, name: str) -> None:
        """Remove a file or folder if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._at(name), recursive=True)

    def _found(self) -> dict[str, Any]:
        """Return the driver's description of every complete file."""
        self._files.invalidate_cache()  # drivers keep old listings, and other machines write into the folder
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            if not self._moves and not self._files.exists(self._root.partition("/")[0]):
                raise
            return {}
        start = len(self._root) + 1
        return {name[start:]: info for name, info in found.items() if not name.endswith(PART)}

    def _copy(self, local: Path, target: str, pace: Pace) -> None:
        with local.open("rb") as source, self._files.open(target, "wb") as sink:
            while data := source.read(_COPY_BYTES):
                sink.write(data)
                pace(len(data))
            sink.flush()
            with contextlib.suppress(AttributeError, OSError):
                os.fsync(sink.fileno())

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


def _age(info: Any, now_s: float) -> float:
    """Return the seconds since a file was written, as its driver reports them."""
    for key in ("mtime", "LastModified", "last_modified", "created"):
        written = info.get(key)
        if isinstance(written, datetime):
            written = written.timestamp()
        if isinstance(written, int | float):
            return max(now_s - written, 0.0)
    return 0.0


def _callback(pace: Pace) -> Any:
    """Convert the pace to a callback of the driver."""
    from fsspec.callbacks import Callback

    class Pacing(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if inc:
                pace(inc)

    return Pacing()
