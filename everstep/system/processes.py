"""Processes of this computer, as /proc/<pid>/stat shows them.

A process id is used again by the kernel; with the start time, in clock ticks
since boot, it names one process for good. psutil says when a process started in
seconds of the wall clock, which move when that is set: that is no identity.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class ProcessInfo(NamedTuple):
    """One process."""

    pid: int
    name: str
    state: str
    """One letter: ``R`` runs, ``D`` waits in the kernel, ``T`` is stopped, ``Z`` is a zombie."""
    parent: int
    session: int
    """Id of its session's leader."""
    start: int
    """Clock ticks from boot to its start."""
    threads: int = 1

    @property
    def lives(self) -> bool:
        """Whether it is not over: a zombie is, but for one whose first thread ended and others did not yet."""
        return self.state not in "ZX" or self.threads > 1


def look(pid: int) -> ProcessInfo | None:
    """The process with this id now, which may be a zombie; None: there is none."""
    return read(PROC / str(pid))


def read(folder: Path) -> ProcessInfo | None:
    """The same of a folder of /proc: of a process, or of one of its threads; None: it is gone."""
    try:
        # Names of processes are bytes of any kind: any user gives theirs.
        head, _, tail = os.fsdecode((folder / "stat").read_bytes()).rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    number, _, name = head.partition(" (")
    return ProcessInfo(int(number), name, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), int(fields[17]))


def pids() -> list[int]:
    """Of all processes."""
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()]


def living() -> Iterator[ProcessInfo]:
    """All processes but zombies."""
    return (found for pid in pids() if (found := look(pid)) is not None and found.lives)


def is_alive(pid: int, start: int) -> bool:
    """Whether the process that started then still runs (a zombie does not)."""
    found = look(pid)
    return found is not None and found.start == start and found.lives


def boot_id() -> str:
    """Of this start of the computer's kernel: start times and process ids of another one mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def main_thread_s(pid: int) -> tuple[float, float] | None:
    """How long the first thread of a process had a CPU since it began, and how long it could have run and had none, in
    seconds; None: that cannot be read."""
    try:
        had_ns, waited_ns, _ = (PROC / str(pid) / "schedstat").read_bytes().split()
        return int(had_ns) / 1e9, int(waited_ns) / 1e9
    except (OSError, ValueError):
        return None
