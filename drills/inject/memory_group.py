"""A group of processes with little memory, for a rank that the kernel is to kill: a cgroup of the drill's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from everstep.errors import CannotInject

ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
"""Where groups are made, by version of cgroups, and which file has their limit."""
LIMIT = 64 << 20
"""Bytes that the processes of the group may take beside what they had before."""


def folder_of_group() -> Path:
    """Where this process makes its group, whether it is there or not."""
    root = next((root for root, limit in ROOTS if (root / limit).exists()), ROOTS[-1][0])
    return root / f"everstep-drill-{os.getpid()}"


def why_not() -> str:
    """Why no such group can be made here; empty: it can."""
    try:
        with small_group():
            return ""
    except CannotInject as error:
        return str(error)


@contextlib.contextmanager
def small_group() -> Iterator[None]:
    """The group, as long as the block lasts.

    Raises:
        CannotInject: it cannot be made.
    """
    folder = folder_of_group()
    limit = next(limit for root, limit in ROOTS if root == folder.parent)
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        remove_group(folder)
        raise CannotInject(f"{folder}: no group of processes with a limit of memory can be made ({error})") from error
    try:
        yield
    finally:
        remove_group(folder)


def remove_group(folder: Path) -> None:
    """Move what is left in it to the group above, and remove it."""
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
