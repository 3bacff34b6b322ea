"""NVIDIA's in-process restart (nvidia-resiliency-ext) with a toy loop, in an environment of its own."""

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
"""Without their dependencies: torch is the one that everstep is measured with."""
LOOP = Path(__file__).with_name("nvrx_loop.py")


def python() -> Path:
    """The interpreter of NVRx's environment, made in the cache folder when it is not there.

    Raises:
        PeerFailed: it cannot be installed, or not imported.
    """
    return environments.python("nvrx", PACKAGES, "nvidia_resiliency_ext.inprocess")


def recover(interpreter: Path, folder: Path, *, ranks: int, rank: int, at_step: int) -> Recovery:
    """Kill one rank; wait until all *surviving* ranks have completed a step of the restarted loop.

    Raises:
        PeerFailed: it did not come to the fault, or not back.
    """
    folder.mkdir(parents=True)
    survivors = [one for one in range(ranks) if one != rank]
    command = [str(interpreter), "-W", "ignore", str(LOOP), str(folder), str(rank), str(at_step), str(_free_port())]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = command[-1]
    started = []
    try:
        for one in range(ranks):
            given = environment | {"RANK": str(one), "LOCAL_RANK": str(one)}
            with (folder / f"output-{one}").open("wb") as file:
                started.append(subprocess.Popen(command, env=given, stdout=file, stderr=file, start_new_session=True))
        first = started[survivors[0]]
        output = folder / f"output-{survivors[0]}"
        try:
            fault_ns = wait_for(lambda: _fault(folder), lambda: first.poll() is None, "the fault", folder)
            stepped = wait_for(
                lambda: all_of(folder, survivors, "step"), lambda: first.poll() is None, "the step after it", folder
            )
        except PeerFailed as error:
            raise PeerFailed(f"{error}; rank {survivors[0]} said: {last_words(output)}") from error
    finally:
        for process in started:
            end_tree(process)
    return Recovery(rank, at_step, (stepped - fault_ns) / 1e9)


def _fault(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((folder / "fault").read_text().split()[1])
    return 0


def _free_port() -> int:
    """A port with some free ones behind it: each restart takes the next."""
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
