"""Folders and files that only their user can access: shared memory, state of agents, local clusters.

``/dev/shm`` and ``/tmp`` belong to all users. So another user could create a folder or link there under a name that we
use, and wait for us to write into it. A folder is *private* when it is a real folder of ours, has mode 0700, and no
other user can replace it. Then no other user can put files into it.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from everstep.errors import ConfigError
from everstep.system import procfs

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_folder(path: Path) -> Path:
    """Make a private folder and its missing parents, or check that an existing folder is private.

    A folder of ours that others can only read is closed to them.

    Returns:
        Its absolute path.

    Raises:
        ConfigError: it is a link or not a folder, belongs to another user, is writable for others, or another user
            could replace it; the message says what to do.
        OSError: it cannot be made.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link of another user
    for parent in reversed(path.parents):
        _check_parent(parent, _made(parent), path)
    status = _made(path)
    _check_own(path, status)
    if status.st_mode & OTHERS:
        _close_to_others(path)
    return path


def check_tree(folder: Path, spared: Container[str] = (), *, by_programs: bool = False) -> None:
    """Check that everything in a private folder is ours, that there are no links, and no folder is writable for others.

    An agent calls this when it starts. The files may be those of an earlier agent, or another user may have put them
    there while the folder was open to others.

    Args:
        folder: A private folder.
        spared: Names in it that are not checked.
        by_programs: Our own programs may have made links and folders there: our links are accepted, and folders that
            are open to others are closed.

    Raises:
        ConfigError: a file or folder fails the check; the message names it and says what to do.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in spared:
                continue
            path = Path(entry.path)
            with suppress(FileNotFoundError):  # a running rank renames and removes files
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    _check_own(path, status, open_too=by_programs)
                    if status.st_mode & OTHERS:
                        _close_to_others(path, open_too=by_programs)
                    check_tree(path, by_programs=by_programs)
                elif (link := stat.S_ISLNK(status.st_mode) and not by_programs) or status.st_uid != os.geteuid():
                    problem = "is a link" if link else f"belongs to user {_name(status.st_uid)}"
                    raise ConfigError(
                        f"{path} {problem}, and another user may have put it there: "
                        f"check what it is and remove it, or name another folder than {folder}"
                    )


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a private file, as an ``opener`` of ``open``. A new file has mode 0600, and links are not followed.

    Raises:
        OSError: ELOOP when it is a link.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def replace(path: Path, contents: str | bytes, *, lasting: bool = False) -> None:
    """Replace a file, with mode 0600; a reader sees either the old contents or the new ones.

    Args:
        path: The file. The contents are first written to ``<name>.new`` beside it.
        contents: The new contents; text is written as UTF-8.
        lasting: Wait until the contents are on the disk.
    """
    fresh = path.with_name(path.name + ".new")
    with open(fresh, "wb", opener=open_file) as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)
        if lasting:
            file.flush()
            os.fsync(file.fileno())
    fresh.rename(path)


def _made(path: Path) -> os.stat_result:
    """The status of a path; a folder is made if there is nothing."""
    try:
        return path.lstat()
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process made it first; the caller checks it too
            path.mkdir(mode=0o700)
        return path.lstat()


def _check_own(path: Path, status: os.stat_result, *, open_too: bool = False) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(
            f"{path} is a link, and its owner decides where we write: remove it, or name the folder itself"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a folder: remove it, or name another path")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {_name(status.st_uid)}, and we are {_name(os.geteuid())}: "
            "its owner could read and change everything in it. Have it removed, or name another folder"
        )
    if status.st_mode & OTHERS_WRITE and not open_too:
        raise ConfigError(
            f"{path} is writable for other users (mode {stat.S_IMODE(status.st_mode):04o}), who may have put something "
            f"into it: remove it, or make sure that everything in it is yours and run 'chmod 700 {path}'"
        )


def _check_parent(parent: Path, status: os.stat_result, path: Path) -> None:
    """Check that no other user can rename entries of a parent folder, and so replace the private folder."""
    if not _is_trusted(status.st_uid):
        raise ConfigError(
            f"{parent}, above {path}, belongs to user {_name(status.st_uid)}, who could put other files there: "
            "name a folder below one of yours, or of root's"
        )
    if stat.S_ISLNK(status.st_mode):
        real = Path(os.path.realpath(parent))
        for above in (*reversed(real.parents), real):
            _check_parent(above, above.lstat(), path)
        return
    own_group = status.st_gid in {0, os.getegid()} and not status.st_mode & stat.S_IWOTH
    if status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX and not own_group:
        raise ConfigError(
            f"{parent}, above {path}, is writable for other users (mode {stat.S_IMODE(status.st_mode):04o}), who could "
            f"put other files there: 'chmod go-w {parent}', or name a folder elsewhere"
        )


def _close_to_others(path: Path, *, open_too: bool = False) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _check_own(path, status, open_too=open_too)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~OTHERS)
    finally:
        os.close(descriptor)


def _is_trusted(user: int) -> bool:
    """Whether a user is root or ourselves, or owns the system's folders in a container that does not map root."""
    if user in {0, os.geteuid()}:
        return True
    return user == procfs.owner_of_hidden_files()


def _name(uid: int) -> str:
    """A user as text for people."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
