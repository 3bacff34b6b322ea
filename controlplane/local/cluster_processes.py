"""Finds the processes of a cluster, and sends signals to them.

A process belongs to a cluster if it was started with ``EVERSTEP_CLUSTER=<id>`` in its environment. This includes forked
ranks, whose environment is that of their fork server, and all processes that they started.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from everstep.rank import environment
from everstep.system.procfs import arguments, living, pids, process_of, threads_of
from everstep.system.procfs import environment as environment_of

STOP_CHECK_S = 0.0005
"""Time between two checks whether a process is stopped, seconds."""


class Process(NamedTuple):
    """The identity of one process: its pid and its start time in clock ticks since boot."""

    pid: int
    start: int


def identify(pid: int) -> Process | None:
    """The process with this pid; None: there is none, or it is a zombie."""
    found = process_of(pid)
    return Process(pid, found.start) if found and found.lives else None


def alive(process: Process) -> bool:
    """Whether this very process still runs; a zombie does not run."""
    return identify(process.pid) == process


def cluster_ids() -> dict[str, set[int]]:
    """Cluster id → pids of its live processes, by the environment with which they were started."""
    key = f"{environment.CLUSTER}=".encode()
    found: dict[str, set[int]] = {}
    for pid in pids():
        for entry in environment_of(pid):
            if entry.startswith(key):
                found.setdefault(os.fsdecode(entry[len(key) :]), set()).add(pid)
                break
    return found


def of_cluster(cluster_id: str) -> set[int]:
    """Pids of a cluster's processes and of all their descendants, without the caller and its ancestors."""
    found = cluster_ids().get(cluster_id, set())
    parents = {process.pid: process.parent for process in living()}
    found &= parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    pid = os.getpid()
    while pid:
        found.discard(pid)
        pid = parents.get(pid, 0)
    return found


def of_machine(cluster_id: str, machine: str, *folders: Path) -> set[int]:
    """Pids of one machine of a cluster: its agent, fork servers, ranks and stores, and all their descendants.

    A process belongs to a machine if its command line has a folder of the machine, if its environment has the
    machine's name, or if an ancestor belongs to the machine. Forked processes have the command line of their fork
    server.

    Args:
        cluster_id: Id of the cluster; processes of other clusters do not count.
        machine: Name of the machine.
        folders: The machine's state folder, and its folder in shared memory, which has its sockets.
    """
    cluster = of_cluster(cluster_id)
    found = {pid for pid in cluster if _is_of(pid, machine, [os.fsencode(folder) for folder in folders])}
    parents = {pid: process.parent for pid in cluster if (process := process_of(pid))}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def _is_of(pid: int, machine: str, folders: list[bytes]) -> bool:
    shown = arguments(pid)
    here = any(argument == folder or argument.startswith(folder + b"/") for argument in shown for folder in folders)
    return here or f"{environment.MACHINE}={machine}".encode() in environment_of(pid)


def find_command(cluster_id: str, argv: list[str], known: set[int]) -> Process | None:
    """A session leader of the cluster with exactly this command line, and a pid that is not in ``known``; None: there
    is none."""
    wanted = [os.fsencode(argument) for argument in argv]
    for pid in cluster_ids().get(cluster_id, set()) - known:
        with suppress(OSError):
            if os.getsid(pid) == pid and arguments(pid) == wanted:
                return identify(pid)
    return None


def send(process: Process, number: int) -> None:
    """Send a signal to this very process; nothing happens if it has ended."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if alive(process):  # from here on, the pidfd refers to this very process
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def wait_stopped(processes: Iterable[Process], seconds: float) -> None:
    """Wait until SIGSTOP has stopped every thread of the processes, at most this many seconds."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if not _is_stopped(process)]
    while left and time.monotonic() < deadline:
        time.sleep(STOP_CHECK_S)
        left = [process for process in left if not _is_stopped(process)]


def _is_stopped(process: Process) -> bool:
    return not alive(process) or all(thread.state in "TtZX" for thread in threads_of(process.pid))


def wait_gone(processes: Iterable[Process], seconds: float) -> set[Process]:
    """Wait until the processes have ended.

    Returns:
        The processes that still run at the time limit.
    """
    deadline = time.monotonic() + seconds
    left = {process for process in processes if alive(process)}
    while left and (remaining := deadline - time.monotonic()) > 0:
        descriptors = []
        for process in left:
            with suppress(OSError):
                descriptors.append(os.pidfd_open(process.pid))
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        if descriptors:
            poll.poll(min(remaining, 0.5) * 1000)
        for descriptor in descriptors:
            os.close(descriptor)
        left = {process for process in left if alive(process)}
    return left
