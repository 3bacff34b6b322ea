"""Measures the loss of machines under torchrun in two ways: start the complete job again, or replace the lost machines.

Both ways favour torchrun: the loss is known at once, the new machines are ready, nothing has to be scheduled, and no
checkpoint is read.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers import step_log
from benchmarks.peers.torchrun import end_tree, start_peer, wait_for

WARM_S = 1.0
"""Time for which a job steps before it loses machines, seconds."""
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
PORT = "port"
"""File with the port of the rendezvous store."""
STEP_LOG = str(Path(step_log.__file__).resolve())


def requeue(folder: Path, script: Path, args: Sequence[str], *, machines: int) -> float:
    """Start a job on all machines, with one rank each; returns the seconds until all ranks have completed a step.

    Raises:
        PeerFailed: the job did not step.
    """
    folder.mkdir(parents=True)
    began_ns = time.time_ns()
    with _nodes(folder, script, args, machines) as nodes:
        stepped_ns = wait_for(lambda: all_stepped(folder, machines, began_ns), _alive(nodes), "the first step", folder)
    return (stepped_ns - began_ns) / 1e9


def reschedule(folder: Path, script: Path, args: Sequence[str], *, machines: int, lost: Sequence[int]) -> float:
    """Kill some machines of a job, and start their replacements at once; returns the seconds until all ranks step.

    Args:
        folder: Folder for logs, which is made.
        script: The training script.
        args: Arguments of the script.
        machines: Number of machines, with one rank each.
        lost: Numbers of the machines that are killed. Machine 0 is not among them: it has the rendezvous store.

    Raises:
        PeerFailed: the job did not step before or after the loss.
    """
    folder.mkdir(parents=True)
    with _nodes(folder, script, args, machines) as nodes:
        wait_for(lambda: all_stepped(folder, machines, 0), _alive(nodes), "the first step", folder)
        time.sleep(WARM_S)
        killed_ns = time.time_ns()
        for number in lost:
            end_tree(nodes[number])
        replacements = [_start(folder, f"{number}-again", script, args, machines) for number in lost]
        for number, replacement in zip(lost, replacements, strict=True):
            nodes[number] = replacement
        stepped_ns = wait_for(
            lambda: all_stepped(folder, machines, killed_ns), _alive(nodes), "a step after the loss", folder
        )
    return (stepped_ns - killed_ns) / 1e9


@contextmanager
def _nodes(folder: Path, script: Path, args: Sequence[str], machines: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / PORT).write_text(str(free.getsockname()[1]))
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        nodes += [_start(folder, str(number), script, args, machines) for number in range(machines)]
        yield nodes
    finally:
        for node in nodes:
            end_tree(node)


def _start(folder: Path, name: str, script: Path, args: Sequence[str], machines: int) -> subprocess.Popen[bytes]:
    """Start the torchrun of one machine."""
    command = [TORCHRUN, "--nnodes", str(machines), "--nproc-per-node", "1", "--max-restarts", "100"]
    command += ["--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
    command += [
        "--rdzv-endpoint",
        f"127.0.0.1:{(folder / PORT).read_text()}",
        "--rdzv-conf",
        f"is_host={'true' if name == '0' else 'false'}",
    ]
    own = folder / f"node-{name}"
    own.mkdir()
    return start_peer([*command, STEP_LOG, str(folder), str(script), *args], own, {})


def _alive(nodes: Sequence[subprocess.Popen[bytes]]) -> Callable[[], bool]:
    return lambda: all(node.poll() is None for node in nodes)


def all_stepped(folder: Path, ranks: int, after_ns: int) -> int:
    """Return the time at which all ranks had completed a step in processes started after ``after_ns``, nanoseconds; 0:
    not yet."""
    times = [_stepped(folder, rank, after_ns) for rank in range(ranks)]
    return max(times) if all(times) else 0


def _stepped(folder: Path, rank: int, after_ns: int) -> int:
    for path in folder.glob(f"{rank}-*"):
        began = False
        for line in path.read_text().splitlines():
            event, _, time_ns = line.partition(" ")
            began |= event == "started" and int(time_ns) >= after_ns
            if began and event == "step":
                return int(time_ns)
    return 0
