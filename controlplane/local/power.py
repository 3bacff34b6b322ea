"""Simulates a power loss of machines of a local cluster: all their processes die at once, and restart later.

All machines share one kernel, so a machine is a set of processes: its agent, fork servers, ranks and stores, and all
their descendants. While the power is off, its agent is *held*: the supervisor does not restart it before the caller has
emptied memory and disk.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agent.monitor.kernel.shared import begin_anew
from controlplane.local import cluster_processes
from controlplane.local.cluster_file import ClusterFile
from controlplane.local.plan import State, hold, let_go
from everstep.errors import ClusterError

ROUNDS = 20
"""Limit of rounds of kills; a process that is forked during one round is killed in the next round."""
STOP_LIMIT_S = 1.0
"""Time limit for a process to stop after SIGSTOP, seconds; a process that waits for a disk stops later."""
CHECK_S = 0.0005
"""Time between two checks of ``when``, seconds."""


@contextmanager
def powered_off(
    cluster: ClusterFile, machines: Sequence[str], *, when: Callable[[], bool] = lambda: True
) -> Iterator[int]:
    """SIGKILL all processes of some machines; their agents start again after the block.

    Args:
        cluster: A running cluster.
        machines: Names of the machines.
        when: Returns whether this is the right moment. It is polled, and called again while all processes are stopped,
            so that the answer holds until they are killed.

    Yields:
        The time at which they were killed, nanoseconds of the wall clock.

    Raises:
        ClusterError: a machine does not exist, or one of its processes cannot be killed.
    """
    known = {machine.name for machine in cluster.machines}
    if unknown := set(machines) - known:
        names = ", ".join(sorted(unknown))
        raise ClusterError(f"cluster {cluster.name} has no machine {names}: see 'everstep machines'")
    with ExitStack() as held:
        for machine in machines:
            hold(cluster.home, f"agent-{machine}")
            held.callback(let_go, cluster.home, f"agent-{machine}")
            held.callback(begin_anew, state_folder(cluster, machine))
        yield _kill(cluster, machines, when)


def empty_memory(cluster: ClusterFile, machine: str) -> None:
    """Empty the shared memory of a machine that is off."""
    _empty(cluster.shm / machine)


def empty_disk(cluster: ClusterFile, machine: str) -> None:
    """Empty the state folder of a machine that is off, with the checkpoints in it."""
    _empty(state_folder(cluster, machine))


def state_folder(cluster: ClusterFile, machine: str) -> Path:
    """The folder in which a machine's agent keeps its state."""
    return cluster.home / "machines" / machine


def _kill(cluster: ClusterFile, machines: Sequence[str], when: Callable[[], bool]) -> int:
    """Kill until no process is left; returns the time at which the first round began."""
    killed_ns = 0
    for _ in range(ROUNDS):
        found = _processes(cluster, machines)
        if not killed_ns:
            _stop_when(found, when)
            killed_ns = time.time_ns()
        if not found:
            return killed_ns
        for process in found:
            cluster_processes.send(process, signal.SIGKILL)
        cluster_processes.wait_gone(found, 1.0)
    left = sorted(process.pid for process in _processes(cluster, machines))
    raise ClusterError(f"processes {left} of {', '.join(machines)} cannot be killed: check their state with ps")


def _stop_when(found: Sequence[cluster_processes.Process], when: Callable[[], bool]) -> None:
    """Stop processes at the right moment; if the moment has passed, let them continue and try again."""
    while True:
        while not when():
            time.sleep(CHECK_S)
        is_right = False
        try:
            for process in found:
                cluster_processes.send(process, signal.SIGSTOP)
            cluster_processes.wait_stopped(found, STOP_LIMIT_S)
            is_right = when()
        finally:
            if not is_right:
                for process in found:
                    cluster_processes.send(process, signal.SIGCONT)
        if is_right:
            return


def _processes(cluster: ClusterFile, machines: Sequence[str]) -> list[cluster_processes.Process]:
    """All processes of the machines, agents first, since a machine without power reports nothing about its ranks."""
    agents = {running.pid for name, running in State.load(cluster.home).processes.items() if name.startswith("agent-")}
    pids = {
        pid
        for name in machines
        for pid in cluster_processes.of_machine(cluster.id, name, state_folder(cluster, name), cluster.shm / name)
    }
    ordered = sorted(pids, key=lambda pid: (pid not in agents, pid))
    return [process for pid in ordered if (process := cluster_processes.identify(pid))]


def _empty(folder: Path) -> None:
    """Remove the contents of a folder; mounts in it are emptied, and stay mounted."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if os.path.ismount(path):
            _empty(path)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
