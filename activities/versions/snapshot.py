"""A snapshot of code: an archive with the files of a folder or of a git revision, limited in size.

``everstep/system/code_archive.py`` defines its digest.
"""

from __future__ import annotations

import os
import posixpath
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, cast

from activities.versions.git import GitFolder, read_blobs, work_tree_of
from activities.versions.listing import files_of
from activities.versions.progress import SnapshotProgress
from everstep.base.text import listed, printable, size_text
from everstep.errors import ConfigError, NoSuchFolder
from everstep.model.version import Origin
from everstep.system.code_archive import MAX_BYTES, MAX_FILE_BYTES, MAX_FILES, CodeFile, Packer, digest_of, leaves

IN_MEMORY = 16 << 20
"""An archive that is larger than this is kept in a temporary file, bytes."""
NAMED = 5
"""The largest number of files and folders that an error names."""
LEFT_OUT = (
    "have git ignore files that are not code (.gitignore), name a smaller folder with --code DIR, or run in place"
)
"""The advice about a folder of which no version can be made."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a snapshot."""

    path: str
    kind: str
    """The kind, as in :class:`everstep.system.code_archive.CodeFile`."""
    bytes: int


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    """A snapshot; a context manager, which removes the archive at its end."""

    digest: str
    files: list[CodeFile]
    archive: BinaryIO
    """The archive, an open file at its beginning."""
    archive_bytes: int
    origin: Origin

    @property
    def bytes(self) -> int:
        """The size of all files together, bytes."""
        return sum(file.bytes for file in self.files)

    def __enter__(self) -> CodeSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.archive.close()


def folder_snapshot(folder: Path, progress: SnapshotProgress | None = None) -> CodeSnapshot:
    """Return a snapshot of a folder's present files.

    Args:
        folder: The path of the folder.
        progress: The progress, which is updated; None: it is not needed.

    Raises:
        NoSuchFolder: the folder does not exist.
        ConfigError: the folder is too large, cannot be read, or has links to the outside.
    """
    if not folder.is_dir():
        raise NoSuchFolder(f"there is no folder {folder} here: give the absolute path of one")
    found = [_found(folder, name) for name in files_of(folder)]
    kept = [file for file in found if file is not None]
    _check(str(folder), kept)
    git = GitFolder(folder) if work_tree_of(folder) else None
    origin = git.origin() if git else Origin(folder=str(folder))
    if git and origin.commit:
        origin = origin.model_copy(update={"dirty": git.is_dirty()})
    return _packed(kept, (_contents(folder, file) for file in kept), origin, progress)


def revision_snapshot(folder: Path, revision: str, progress: SnapshotProgress | None = None) -> CodeSnapshot:
    """Return a snapshot of the files that a git revision has below a folder; the folder's present files do not matter.

    Args:
        folder: The path of the folder.
        revision: The revision, in any form that git accepts.
        progress: The progress, which is updated; None: it is not needed.

    Raises:
        NoSuchFolder: the folder does not exist.
        ConfigError: the revision does not exist, or cannot be a snapshot.
    """
    if not folder.is_dir():
        raise NoSuchFolder(f"there is no folder {folder} here: give one of a git repository")
    if not work_tree_of(folder):
        raise ConfigError(f"{folder} is not in a git repository here: name a folder that is, or name no revision")
    git = GitFolder(folder)
    commit = git.resolved(revision)
    blobs = git.tree(commit)
    found = [FoundFile(_text(folder, blob.path), blob.kind, blob.bytes) for blob in blobs]
    _check(f"{folder} at {revision}", found)
    return _packed(found, read_blobs(blobs), git.origin(commit), progress)


def _found(folder: Path, name: str) -> FoundFile | None:
    """Return a file of a folder; None: it is not a regular file, e.g. a socket, or was just removed."""
    path = folder / _text(folder, name)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        root, real = os.path.realpath(folder), os.path.realpath(path)
        if real != root and not real.startswith(f"{root}/"):
            _refuse_link(folder, name, str(path.readlink()))
        return FoundFile(name, "l", status.st_size)
    if not stat.S_ISREG(status.st_mode):
        return None
    return FoundFile(name, "x" if status.st_mode & 0o100 else "f", status.st_size)


def _contents(folder: Path, file: FoundFile) -> bytes:
    path = folder / file.path
    try:
        if file.kind == "l":
            return os.fsencode(path.readlink())
        with path.open("rb") as source:
            return source.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. {LEFT_OUT.capitalize()}") from error


def _packed(
    found: Sequence[FoundFile], contents: Iterable[bytes], origin: Origin, progress: SnapshotProgress | None
) -> CodeSnapshot:
    """Return a snapshot with an archive of the files; ``contents`` are in the order of ``found``."""
    progress = progress or SnapshotProgress()
    progress.of = len(found)
    archive = cast(BinaryIO, tempfile.SpooledTemporaryFile(IN_MEMORY, prefix="everstep-code-"))  # noqa: SIM115
    try:
        held, total = [], 0
        with Packer(archive) as packer:
            for file, data in zip(found, contents, strict=True):
                total += len(data)
                if len(data) > MAX_FILE_BYTES or total > MAX_BYTES:
                    raise ConfigError(
                        f"{file.path} in {origin.folder} grew while it was read, and is too large now: {LEFT_OUT}"
                    )
                if file.kind == "l":
                    _check_link(Path(origin.folder), file.path, data)
                held.append(packer.add(file.path, file.kind, data))
                progress.files, progress.bytes = len(held), total
        size = archive.tell()
        archive.seek(0)
    except BaseException:
        archive.close()
        raise
    return CodeSnapshot(digest_of(held), held, archive, size, origin)


def _check(where: str, files: Sequence[FoundFile]) -> None:
    """Raise an error if there are no files, or if they are too many or too large for the code of a job."""
    total = sum(file.bytes for file in files)
    largest = sorted(files, key=lambda file: -file.bytes)
    large = [file for file in largest if file.bytes > MAX_FILE_BYTES]
    bounds = (
        f"a version has at most {MAX_FILES} files of {size_text(MAX_BYTES)}, and {size_text(MAX_FILE_BYTES)} a file"
    )
    if not files:
        raise ConfigError(f"{where} has no file that git does not ignore: there is nothing to run")
    if large or total > MAX_BYTES:
        named = listed([f"{file.path} ({size_text(file.bytes)})" for file in large or largest], NAMED, noun="files")
        raise ConfigError(
            f"{where} is too large for a version of code, with {size_text(total)}: {named}. {bounds}: {LEFT_OUT}"
        )
    if len(files) > MAX_FILES:
        folders = Counter(posixpath.dirname(file.path) or "." for file in files)
        named = listed([f"{name} ({count})" for name, count in folders.most_common()], NAMED, noun="folders")
        raise ConfigError(
            f"{where} has too many files for a version of code, {len(files)}, most of them in {named}. "
            f"{bounds}: {LEFT_OUT}"
        )


def _check_link(folder: Path, path: str, target: bytes) -> None:
    try:
        told = target.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{folder / path} is a link to a name that is not UTF-8: have git ignore it") from None
    if leaves(path, told):
        _refuse_link(folder, path, told)


def _refuse_link(folder: Path, path: str, target: str) -> NoReturn:
    raise ConfigError(
        f"{folder / path} is a link to a place outside of the folder, {printable(target)}: "
        "a version has only files of its folder. Have git ignore the link and pass its target as an argument, make "
        "the link relative and within the folder, or name a folder with both by --code DIR"
    )


def _text(folder: Path, name: str) -> str:
    """Return a name, which must be valid text because it is sent to other machines."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the name {printable(name)} in {folder} is not UTF-8: rename the file, or have git ignore it"
        ) from None
    return name
