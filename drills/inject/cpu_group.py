"""A group of processes with little CPU, for the ranks of a machine that is to be slow: a cgroup of the drill's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from drills.inject.memory_group import remove_group
from everstep.errors import CannotInject

FIRST, SECOND = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
"""Where groups are made, by version of cgroups."""
PERIOD_US = 20_000
"""A group has its share anew so often, microseconds: short beside a step, so that all of a step is slow."""
LEAST_US = 1_000
"""The kernel gives no group less."""


def why_not() -> str:
    """Why no such group can be made here; empty: it can."""
    try:
        with little_cpu([], 1.0):
            return ""
    except CannotInject as error:
        return str(error)


@contextlib.contextmanager
def little_cpu(pids: Iterable[int], cpus: float) -> Iterator[None]:
    """Some processes, and what they start, have so many CPUs together as long as the block lasts.

    Raises:
        CannotInject: the group cannot be made.
    """
    quota_us = max(round(cpus * PERIOD_US), LEAST_US)
    root = FIRST if (FIRST / "cpu.cfs_quota_us").exists() or FIRST.is_dir() else SECOND
    folder = root / f"everstep-drill-cpu-{os.getpid()}"
    try:
        folder.mkdir()
        if root == FIRST:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        remove_group(folder)
        raise CannotInject(f"{folder}: no group of processes with little CPU can be made ({error})") from error
    try:
        yield
    finally:
        remove_group(folder)
