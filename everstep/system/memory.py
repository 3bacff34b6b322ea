"""How much memory and shared memory there is to be had on this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from everstep.system.procfs import PROC, cgroups, meminfo

CGROUPS = Path("/sys/fs/cgroup")


def free(path: Path) -> int:
    """Free bytes of the file system of a folder; 0 when there is none."""
    try:
        space = os.statvfs(path)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize


def memory_available() -> int:
    """Memory that may still be used: of the machine, or of the cgroup of this process or one above, whichever is less.

    Shared memory counts against the cgroup of the process that touches it first; beyond the limit the kernel kills.
    """
    return min([meminfo(PROC).get("MemAvailable", 0), *_left_in_cgroups()])


def _left_in_cgroups() -> list[int]:
    left = []
    for folder, limit, usage in _limited():
        with contextlib.suppress(OSError, ValueError):
            # What was read from files and is not in use is given back before anybody is killed.
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cache = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
            used = int((folder / usage).read_text())
            left.append(max(0, int((folder / limit).read_text()) - used + cache))
    return left


def _limited() -> list[tuple[Path, str, str]]:
    """The cgroups of this process, from its own to the root, of version 2 and 1."""
    found = []
    for controllers, name in cgroups(PROC):
        own = Path(name.lstrip("/"))
        for relative in (own, *own.parents):
            if not controllers:
                found.append((CGROUPS / relative, "memory.max", "memory.current"))
            elif "memory" in controllers:
                found.append((CGROUPS / "memory" / relative, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return found


def oom_kills() -> int | None:
    """How many processes the kernel has killed in the cgroup of this process, for its memory was used up.

    Returns:
        None: the kernel does not count that here.
    """
    for folder, _, _ in _limited():
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                counts = dict(line.split() for line in (folder / name).read_text().splitlines())
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
    return None
