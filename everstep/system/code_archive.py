"""Packs a snapshot of code into an archive, unpacks it, and computes its digest.

The *digest* depends only on the files of a snapshot, and not on who packed them or when. It is the sha256 of one line
for each file, sorted by path: ``<kind> <sha256 of its contents> <path>``, ended by a NUL. The kind is ``f`` for a file,
``x`` for an executable file and ``l`` for a symbolic link, whose contents are its target. Empty folders do not count.
A reader verifies an archive by computing the digest of its files.

The archive is a tar file in gzip. A reader trusts nothing in it: it refuses paths that leave the folder, devices, and
sizes beyond the bounds.

This module needs only the standard library, since agents, workers and commands use it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import posixpath
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from everstep.errors import DamagedCode

MAX_FILES = 20_000
"""The most files of one snapshot."""
MAX_BYTES = 200_000_000
"""The most bytes of all files of one snapshot together."""
MAX_FILE_BYTES = 25_000_000
"""The most bytes of one file: code is smaller, and data belongs elsewhere."""
DIGEST = re.compile(r"[0-9a-f]{64}")
"""The form of a digest. Digests name folders and files, so a received digest is checked before it is used."""
LEVEL = 1
"""Level of gzip. This level is the quickest, and reduces Python code to a quarter. The best level is hardly better."""
PIECE = 1 << 20
_PACKED_S = 315_532_800
"""Time of all files: 1980. It is the first time that a zip file can record, and tools may put the files into a zip."""
_FILE_MODES = {"f": 0o444, "x": 0o555}


@dataclass(frozen=True, slots=True)
class CodeFile:
    """One file of a snapshot."""

    path: str
    """Relative, with ``/``."""
    kind: str
    """``f``, ``x`` or ``l``."""
    sha256: str
    """Digest of its contents, or of a link's target."""
    bytes: int = 0


def digest_of(files: Iterable[CodeFile]) -> str:
    """The digest of a snapshot, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        digest.update(f"{file.kind} {file.sha256} {file.path}\0".encode())
    return digest.hexdigest()


def leaves(path: str, target: str) -> bool:
    """Whether a link at a relative path leads out of its snapshot, as every absolute target does."""
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return target.startswith("/") or inside == ".." or inside.startswith("../")


class Packer:
    """Writes an archive; a context manager. Files added in the order of their paths give the same bytes each time.

    Args:
        output: The file that receives the archive.
    """

    def __init__(self, output: BinaryIO) -> None:
        self._gzip = gzip.GzipFile("", "wb", LEVEL, output, mtime=0)
        self._tar = tarfile.TarFile(fileobj=self._gzip, mode="w", format=tarfile.PAX_FORMAT)

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()
        self._gzip.close()

    def add(self, path: str, kind: str, contents: bytes) -> CodeFile:
        """Append a file, or a link with its target as contents; returns its entry."""
        entry = tarfile.TarInfo(path)
        entry.mtime = _PACKED_S
        if kind == "l":
            entry.type, entry.linkname = tarfile.SYMTYPE, contents.decode()
            self._tar.addfile(entry)
        else:
            entry.size, entry.mode = len(contents), _FILE_MODES[kind]
            self._tar.addfile(entry, io.BytesIO(contents))
        return CodeFile(path, kind, hashlib.sha256(contents).hexdigest(), len(contents))


def read_archive(source: BinaryIO, use: Callable[[CodeFile, bytes], None] = lambda *_: None) -> list[CodeFile]:
    """Read an archive to its end; returns its files, whose digest (:func:`digest_of`) identifies the snapshot.

    Args:
        source: The archive.
        use: Called with each file and its contents. Only one file at a time is in memory.

    Raises:
        DamagedCode: it is not an archive, is cut off, or contains something that a snapshot never does.
    """
    files: list[CodeFile] = []
    seen: set[str] = set()
    total = 0
    try:
        with gzip.GzipFile(fileobj=source, mode="rb") as unzipped:
            bounded = _Bounded(unzipped)
            tar = tarfile.open(fileobj=bounded, mode="r|")  # noqa: SIM115 - there is nothing to close
            for entry in tar:
                kind, contents = _contents(tar, entry)
                total += len(contents)
                if len(files) >= MAX_FILES or total > MAX_BYTES:
                    raise DamagedCode(f"the archive holds more than {MAX_FILES} files or {MAX_BYTES} bytes")
                if entry.name in seen:
                    raise DamagedCode(f"{entry.name!r} is in the archive twice")
                seen.add(entry.name)
                file = CodeFile(entry.name, kind, hashlib.sha256(contents).hexdigest(), len(contents))
                use(file, contents)
                files.append(file)
            while bounded.read(PIECE):  # gzip verifies its checksum at the end
                pass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeError, ValueError) as error:
        raise DamagedCode(f"it is not a complete archive: {error}") from error
    return files


def unpack(source: BinaryIO, folder: Path, digest: str) -> list[CodeFile]:
    """Unpack an archive, as read-only files, into a folder that does not exist yet.

    Args:
        source: The archive.
        folder: The folder to make. After an error it may contain files, which the caller has to remove.
        digest: The digest that the snapshot must have.

    Raises:
        DamagedCode: the archive is damaged, or its digest differs.
        OSError: a file cannot be written.
    """
    folder.mkdir(mode=0o700)
    links: list[tuple[Path, str]] = []

    def write(file: CodeFile, contents: bytes) -> None:
        path = folder / file.path
        if file.kind == "l":
            links.append((path, contents.decode()))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as sink:
            sink.write(contents)
            os.fchmod(descriptor, 0o500 if file.kind == "x" else 0o400)

    try:
        files = read_archive(source, write)
        for path, target in links:  # made last, so that no file is written through a link
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedCode(f"a file of the archive lies within another one: {error}") from error
    if (actual := digest_of(files)) != digest:
        raise DamagedCode(f"the archive holds {actual[:12]} and not {digest[:12]}")
    return files


class _Bounded(io.RawIOBase):
    """The unzipped bytes, limited to the size of the largest archive, in which a file's headers take at most 3 KiB."""

    _MOST = MAX_BYTES + MAX_FILES * 4096

    def __init__(self, source: gzip.GzipFile) -> None:
        self._source, self._left = source, self._MOST

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        data = self._source.read(PIECE if size is None or size < 0 else size)
        self._left -= len(data)
        if self._left < 0:
            raise DamagedCode(f"the archive unpacks to more than {self._MOST} bytes")
        return data


def _contents(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> tuple[str, bytes]:
    """Kind and contents of an entry."""
    entry.name.encode()  # raises an error if the name is not text
    parts = entry.name.split("/")
    if not entry.name or entry.name.startswith("/") or {"", ".", ".."} & set(parts):
        raise DamagedCode(f"{entry.name!r} is no path within a snapshot")
    if entry.issym():
        if leaves(entry.name, entry.linkname):
            raise DamagedCode(f"{entry.name} is a link that leaves the snapshot: {entry.linkname!r}")
        return "l", entry.linkname.encode()
    if not entry.isreg():
        raise DamagedCode(f"{entry.name} is neither a file nor a link")
    if entry.size > MAX_FILE_BYTES:
        raise DamagedCode(f"{entry.name} has {entry.size} bytes, and a file has at most {MAX_FILE_BYTES}")
    file = tar.extractfile(entry)
    data = file.read() if file else b""
    if len(data) != entry.size:
        raise DamagedCode(f"{entry.name} is cut off")
    return ("x" if entry.mode & 0o100 else "f"), data
