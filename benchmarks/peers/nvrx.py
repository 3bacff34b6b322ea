"""Measures NVIDIA's in-process restart (nvidia-resiliency-ext), with a toy loop in an environment of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path

from benchmarks.peers import environments
from benchmarks.peers.torchrun import PeerFailed, all_of, end_tree, last_words, wait_for
from benchmarks.timeline import Recovery

PACKAGES = ("nvidia-resiliency-ext==0.4.1", "defusedxml", "nvidia-ml-py", "packaging", "psutil", "pyyaml", "numpy")
"""Packages of the environment, installed without their dependencies."""
LOOP = Path(__file__).with_name("nvrx_loop.py")


def python() -> Path:
    """Return the interpreter of NVRx's environment; make the environment if it does not exist.

    Raises:
        PeerFailed: the packages cannot be installed or imported.
    """
    return environments.python("nvrx", PACKAGES, "nvidia_resiliency_ext.inprocess")


def recover(interpreter: Path, folder: Path, *, ranks: int, rank: int, at_step: int) -> Recovery:
    """Kill one rank, and wait until all surviving ranks have completed a step of the restarted loop.

    Raises:
        PeerFailed: the loop did not reach the fault, or did not step after it.
    """
    folder.mkdir(parents=True)
    survivors = [survivor for survivor in range(ranks) if survivor != rank]
    command = [str(interpreter), "-W", "ignore", str(LOOP), str(folder), str(rank), str(at_step), str(_free_port())]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = command[-1]
    started = []
    try:
        for number in range(ranks):
            env = environment | {"RANK": str(number), "LOCAL_RANK": str(number)}
            with (folder / f"output-{number}").open("wb") as file:
                started.append(subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True))
        first = started[survivors[0]]
        output = folder / f"output-{survivors[0]}"
        try:
            fault_ns = wait_for(lambda: _fault(folder), lambda: first.poll() is None, "the fault", folder)
            stepped = wait_for(
                lambda: all_of(folder, survivors, "step"),
                lambda: first.poll() is None,
                "a step after the fault",
                folder,
            )
        except PeerFailed as error:
            raise PeerFailed(f"{error}; the last output of rank {survivors[0]}: {last_words(output)}") from error
    finally:
        for process in started:
            end_tree(process)
    return Recovery(rank, at_step, (stepped - fault_ns) / 1e9)


def _fault(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((folder / "fault").read_text().split()[1])
    return 0


def _free_port() -> int:
    """Return a free port that is followed by four more free ports, since each restart uses the next port."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                for offset in range(1, 5):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port
    raise PeerFailed("no five free ports in a row on 127.0.0.1")
