"""Small file systems for a cluster, with which drills fill a disk or shared memory."""

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
    inside = [path for path in ours if path.is_relative_to(folder)]
    return sorted(inside, key=lambda path: (-len(path.parts), path))


def unmount(folder: Path) -> None:
    """Unmount everstep's mounts at a folder or below it, even if they are busy."""
    for path in below(folder):
        if _run("umount", str(path)):
            _run("umount", "-l", str(path))  # hides a busy mount at once; it ends when no process uses it any more


@contextmanager
def small(folder: Path, size: int) -> Iterator[None]:
    """Mount a memory file system of this size over a folder while the block runs.

    Args:
        folder: Folder, which is made if it does not exist; its own files are hidden meanwhile.
        size: Size in bytes.

    Raises:
        ClusterError: it cannot be mounted; the message has the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder, size)
    try:
        yield
    finally:
        unmount(folder)


def shrink(folder: Path, spare: int) -> None:
    """Shrink a file system of :func:`small` to its used size plus this number of free bytes.

    Raises:
        ClusterError: it cannot be shrunk; the message has the reason.
    """
    now = os.statvfs(folder)
    used = (now.f_blocks - now.f_bfree) * now.f_frsize
    if problem := _run("mount", "-o", f"remount,size={used + spare}", str(folder)):
        raise ClusterError(f"the file system on {folder} cannot be made smaller: {problem}")


def remount(folder: Path, *, read_only: bool) -> None:
    """Make a file system of :func:`small` read-only, or writable again.

    Raises:
        ClusterError: it cannot be remounted; the message has the reason.
    """
    if problem := _run("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(folder)):
        raise ClusterError(f"the file system on {folder} cannot be remounted: {problem}")


def why_not(folder: Path) -> str:
    """Why file systems cannot be mounted in a folder; empty: they can."""
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
        raise ClusterError(f"mounting a file system on {folder} needs root: run this as root, or in your own container")
    if problem := _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", SOURCE, str(folder)):
        raise ClusterError(f"a file system cannot be mounted on {folder}: {problem}")


def _run(*command: str) -> str:
    """Run a command; returns its error output, or "" if it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stderr.strip() or f"{command[0]} ended with code {done.returncode}") if done.returncode else ""
