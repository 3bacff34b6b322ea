"""Writes files that are either complete and on the disk, or do not exist."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from everstep.base.text import size_text
from everstep.errors import CheckpointError

WRITING = ".writing"
"""End of the names of incomplete files, which readers of checkpoints ignore."""
FLUSH_BYTES = 64 << 20
"""After this many bytes, written data is flushed to the disk and dropped from the page cache. So the files that
training reads stay in memory, and the end of a large file does not take long."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class Output:
    """A file that has a temporary name until ``commit``; without ``commit`` it is deleted.

    Args:
        path: The final path. The folder is made when it does not exist.
        size: Size of the file, bytes. The room is reserved at the beginning, so that a full disk is an error then.

    Raises:
        CheckpointError: the file cannot be written; for a full disk the message has numbers. All methods may raise it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._written = self._flushed = 0
        self._digest = xxhash.xxh3_64()
        # The name is unique: on a shared disk, a machine that was evicted may still write a file of the same rank.
        self._temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{WRITING}")
        try:
            _make_folder(path.parent)
            for left in path.parent.glob(f"{path.name}.*{WRITING}"):
                left.unlink(missing_ok=True)
            self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        try:
            if self.size:
                os.posix_fallocate(self._descriptor, 0, self.size)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                self.__exit__(None, None, None)
                raise self._failure(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with contextlib.suppress(OSError):
                self._temporary.unlink()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append data."""
        self._digest.update(data)
        try:
            with memoryview(data) as view:
                done = 0
                while done < len(view):
                    done += os.write(self._descriptor, view[done:])
            self._written += len(data)
            if self._written - self._flushed >= FLUSH_BYTES:
                self._flush()
        except OSError as error:
            raise self._failure(error) from error

    def fill(self, end: int) -> None:
        """Append zeros up to byte ``end``."""
        self.write(bytes(end - self._written))

    def digest(self) -> str:
        """xxh3_64 of all data written so far, hexadecimal."""
        return self._digest.hexdigest()

    def sync(self) -> None:
        """Wait until all data written so far is on the disk."""
        try:
            self._flush()
        except OSError as error:
            raise self._failure(error) from error

    def commit(self, outdated: Path | None = None) -> None:
        """Wait until all data is on the disk, and give the file its final name.

        Args:
            outdated: A file that describes an older file of that name; it is deleted first.
        """
        try:
            os.fsync(self._descriptor)
            if outdated is not None:
                outdated.unlink(missing_ok=True)
            self._temporary.rename(self.path)
            os.close(self._descriptor)
            self._descriptor = -1
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._failure(error) from error

    def _flush(self) -> None:
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._flushed = self._written

    def _failure(self, error: OSError) -> CheckpointError:
        if error.errno not in _NO_ROOM:
            return CheckpointError(f"{self.path} cannot be written: {error.strerror or error}")
        free = "an unknown size"
        with contextlib.suppress(OSError):
            space = os.statvfs(self.path.parent)
            free = size_text(space.f_bavail * space.f_frsize)
        return CheckpointError(
            f"no room for {self.path.name} of {size_text(self.size)} in {self.path.parent}: {free} is free. "
            "Free space, keep fewer checkpoints (disk_keep) or give another folder (disk_path)"
        )


def replace_file(path: Path, data: bytes) -> None:
    """Write or replace a small file atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    with Output(path, len(data)) as output:
        output.write(data)
        output.commit()


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync each of them to the disk."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new_folder in reversed(missing):
        new_folder.mkdir(exist_ok=True)
        sync_folder(new_folder.parent)
