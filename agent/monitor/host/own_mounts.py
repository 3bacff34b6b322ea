"""This module lists file systems that the agent and its jobs need; only these can be a reason to evict the machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from agent.monitor.inspection import Site
from everstep.system.procfs import Mount

ALWAYS = ("/", "/tmp")
"""Folders that every job needs."""


def needed_points(site: Site, table: Mapping[str, Mount], required: Collection[str] = ()) -> set[str]:
    """Return the mount points of the file systems that the agent and the ranks need.

    Args:
        site: The machine.
        table: All mounted file systems by mount point.
        required: Mount points that the settings require.
    """
    around = {point for path in (*ALWAYS, *required, *_folders(site)) if (point := _point_of(Path(path), table))}
    within = {point for point in table if Path(point).is_relative_to(site.state_dir)}
    return around | within


def devices_of(site: Site, points: Collection[str], table: Mapping[str, Mount]) -> set[str]:
    """Return the names of the devices of file systems as the kernel log writes them, and of the disks below them."""
    found: set[str] = set()
    for source in {table[point].source for point in points if table[point].source.startswith("/dev/")}:
        names = {Path(source).name, Path(os.path.realpath(source)).name}
        for name in names:
            with suppress(OSError):
                found |= {below.name for below in (site.sys / "class/block" / name / "slaves").iterdir()}
        found |= names
    return found


def _folders(site: Site) -> Iterator[str]:
    """Yield the agent's folders, and those in which ranks work."""
    yield from (str(site.state_dir), str(site.shm_dir))
    for rank in site.ranks():
        with suppress(OSError):
            yield str((site.proc / str(rank.pid) / "cwd").readlink())


def _point_of(path: Path, table: Mapping[str, Mount]) -> str:
    """Return the mount point of a folder; empty: the table has none."""
    return next((str(each) for each in (path, *path.parents) if str(each) in table), "")
