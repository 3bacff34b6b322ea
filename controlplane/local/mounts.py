"""Small file systems for one cluster: drills use them for a full disk and full shared memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.errors import ClusterError
from everstep.system import procfs

SOURCE = "everstep"
"""Name of everstep's mounts in the mount table; other mounts are left alone."""


def below(folder: Path) -> list[Path]:
    """Everstep's mounts at a folder or below it, the deepest first."""
    try:
        ours = [Path(mount.point) for mount in procfs.mounts().values() if mount.source == SOURCE]
    except OSError:
        return []
    inside = [place for place in ours if place.is_relative_to(folder)]
    return sorted(inside, key=lambda place: (-len(place.parts), place))


def unmount(folder: Path) -> None:
    """Unmount everstep's mounts at a folder or below it, even if they are busy."""
    for place in below(folder):
        if _run("umount", str(place)):
            _run("umount", "-l", str(place))  # a busy mount: new users cannot enter it, and it ends with its last user


@contextmanager
def small(folder: Path, size: int) -> Iterator[None]:
    """Mount a memory file system of this size over a folder while the block runs.

    Args:
        folder: made if it does not exist; its files are hidden meanwhile.
        size: size in bytes.

    Raises:
        ClusterError: it cannot be mounted; the message says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder, size)
    try:
        yield
    finally:
        unmount(folder)


def shrink(folder: Path, spare: int) -> None:
    """Shrink a file system of :func:`small` to the used size and this much free room, bytes.

    Raises:
        ClusterError: it cannot be done; the message says why.
    """
    now = os.statvfs(folder)
    used = (now.f_blocks - now.f_bfree) * now.f_frsize
    if said := _run("mount", "-o", f"remount,size={used + spare}", str(folder)):
        raise ClusterError(f"the file system on {folder} cannot be made smaller: {said}")


def remount(folder: Path, *, read_only: bool) -> None:
    """Make a file system of :func:`small` read-only, or writable again.

    Raises:
        ClusterError: it cannot be done; the message says why.
    """
    if said := _run("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(folder)):
        raise ClusterError(f"the file system on {folder} cannot be mounted anew: {said}")


def why_not(folder: Path) -> str:
    """Why nothing can be mounted below a folder; empty: mounting works."""
    trial = folder / f"mount-{os.getpid()}"
    try:
        with small(trial, 1 << 16):
            return ""
    except (ClusterError, OSError) as error:
        return str(error)
    finally:
        if trial.is_dir():
            trial.rmdir()


def _mount(folder: Path, size: int) -> None:
    if os.geteuid():
        raise ClusterError(f"mounting a file system on {folder} needs root: run it as root, or in a container of yours")
    said = _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", SOURCE, str(folder))
    if said:
        raise ClusterError(f"a file system cannot be mounted on {folder}: {said}")


def _run(*command: str) -> str:
    """Run a command; returns its error output, empty if it worked."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stderr.strip() or f"{command[0]} ended with code {done.returncode}") if done.returncode else ""
