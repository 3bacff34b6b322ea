"""Folders and files that only their user may look into: shared memory, state of agents, local clusters.

``/dev/shm`` and ``/tmp`` belong to all users, so a name there may be taken before us, by a folder or link of somebody
who waits for us to write into it. A folder is *private* when it is a real folder of ours, mode 0700, and nobody else
can put another one in its place. In a private folder nothing can be planted.
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
    """Make a private folder, with what is missing above it, or check that it is one; returns its absolute path.

    A folder of ours that others can only read is closed to them.

    Raises:
        ConfigError: it is a link or no folder, belongs to another user, is writable for others, or another user could
            put another folder in its place; the message says what to do.
        OSError: it cannot be made.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link that somebody planted
    for parent in reversed(path.parents):
        _check_parent(parent, _made(parent), path)
    status = _made(path)
    _check_own(path, status)
    if status.st_mode & OTHERS:
        _close_to_others(path)
    return path


def check_tree(folder: Path, spared: Container[str] = (), *, by_programs: bool = False) -> None:
    """Check all that lies in a private folder: ours, no links, no folder that others can write to.

    It is what an agent finds when it starts: left by an earlier one, or by somebody else while the folder was open.

    Args:
        folder: A private folder.
        spared: Names in it that may be anything.
        by_programs: Programs of ours made what is there: links that are ours may be, and folders that their umask left
            open are closed.

    Raises:
        ConfigError: something is not; the message names it and says what to do.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in spared:
                continue
            path = Path(entry.path)
            with suppress(FileNotFoundError):  # a rank that lives renames and removes
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    _check_own(path, status, open_too=by_programs)
                    if status.st_mode & OTHERS:
                        _close_to_others(path, open_too=by_programs)
                    check_tree(path, by_programs=by_programs)
                elif (link := stat.S_ISLNK(status.st_mode) and not by_programs) or status.st_uid != os.geteuid():
                    what = "is a link" if link else f"belongs to user {_name(status.st_uid)}"
                    raise ConfigError(
                        f"{path} {what}, and somebody else may have put it there: "
                        f"look at what it is, and remove it, or name another folder than {folder}"
                    )


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file that is ours: mode 0600 when it is made, and no link is followed. An ``opener`` for ``open``.

    Raises:
        OSError: ELOOP when it is a link.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def replace(path: Path, contents: str | bytes, *, lasting: bool = False) -> None:
    """Replace a file, mode 0600; a reader sees the old contents or the new ones.

    Args:
        path: The file; ``<name>.new`` beside it is used meanwhile.
        contents: Text is written as UTF-8.
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
    """What is there, made when nothing is."""
    try:
        return path.lstat()
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process was quicker; what it made is checked too
            path.mkdir(mode=0o700)
        return path.lstat()


def _check_own(path: Path, status: os.stat_result, *, open_too: bool = False) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(
            f"{path} is a link: whoever made it decides where we write. Remove it, or name the folder itself"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is no folder: remove it, or name another one")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {_name(status.st_uid)}, and we are {_name(os.geteuid())}: "
            "its owner could read and change everything in it. Have it removed, or name another folder"
        )
    if status.st_mode & OTHERS_WRITE and not open_too:
        raise ConfigError(
            f"{path} is writable for other users (mode {stat.S_IMODE(status.st_mode):04o}), who may have put something "
            f"into it: remove it, or see that all in it is yours and 'chmod 700 {path}'"
        )


def _check_parent(parent: Path, status: os.stat_result, path: Path) -> None:
    """Whoever may rename in a parent may put another folder in a private one's place."""
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
    """Root and ourselves; and, where a container does not show who root is, the owner of the system's folders."""
    if user in {0, os.geteuid()}:
        return True
    return user == procfs.owner_of_hidden_files()


def _name(uid: int) -> str:
    """A user for people."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
