"""Measures how much memory and shared memory is available on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from everstep.system.procfs import PROC, cgroups, meminfo

CGROUPS = Path("/sys/fs/cgroup")
_HUGETLBFS = 0x958458F6
"""HUGETLBFS_MAGIC, the type of this file system in the first field of ``statfs``."""
_STATFS_BYTES = 256
"""More than the size of ``struct statfs``."""

_libc = ctypes.CDLL(None, use_errno=True)


def free(path: Path) -> int:
    """Free bytes of the file system of a folder; 0: there is no such folder."""
    try:
        space = os.statvfs(path)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize


def is_hugetlbfs(folder: Path) -> bool:
    """Whether a folder is on hugetlbfs, whose files can be neither written to nor allocated in pages of 4 KiB.

    Raises:
        OSError: the folder's file system cannot be read.
    """
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(folder), status):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    return ctypes.c_long.from_buffer(status).value == _HUGETLBFS


def memory_available() -> int:
    """Bytes that this process may still use: the least that the machine, or a cgroup of the process, has left.

    Shared memory counts against the cgroup of the process that touches it first. Beyond the limit of a cgroup, the
    kernel kills processes.
    """
    return min([meminfo(PROC).get("MemAvailable", 0), *_left_in_cgroups()])


def _left_in_cgroups() -> list[int]:
    left = []
    for folder, limit, usage in _limited():
        with contextlib.suppress(OSError, ValueError):
            # The kernel frees unused copies of files before it kills a process.
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cache = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
            used = int((folder / usage).read_text())
            left.append(max(0, int((folder / limit).read_text()) - used + cache))
    return left


def _limited() -> list[tuple[Path, str, str]]:
    """The cgroups of this process, from its own to the root: folder, file with the limit, file with the usage."""
    limited = []
    for controllers, name in cgroups(PROC):
        own = Path(name.lstrip("/"))
        for relative in (own, *own.parents):
            if not controllers:
                limited.append((CGROUPS / relative, "memory.max", "memory.current"))
            elif "memory" in controllers:
                limited.append((CGROUPS / "memory" / relative, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return limited


def is_killed_as_group() -> str:
    """The cgroup, of this process or above, of which the kernel kills all processes if it kills one for lack of memory.

    Returns:
        Path of the cgroup; empty: there is none.
    """
    for folder, _, _ in _limited():
        with contextlib.suppress(OSError):
            if (folder / "memory.oom.group").read_text().strip() == "1":
                return str(folder)
    return ""


def oom_kills() -> int | None:
    """How many processes of this process's cgroup the kernel has killed for lack of memory; None: it is not counted."""
    for folder, _, _ in _limited():
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                counts = dict(line.split() for line in (folder / name).read_text().splitlines())
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
    return None
