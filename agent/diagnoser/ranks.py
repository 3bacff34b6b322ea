"""This module runs several processes (ranks) that communicate through torch.distributed, for one test.

The ranks are forked from the test's process, which has imported torch, but has not used a GPU and has no other threads.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from everstep.errors import CannotInspect
from everstep.system.listening import address_of, listen

if TYPE_CHECKING:
    import torch

PR_SET_PDEATHSIG = 1
OWN = "127.0.0.1"
WITHIN = {"GLOO_SOCKET_IFNAME": "lo"}
"""Variables that make the ranks of one machine use the loopback interface, which works without a network."""


class RanksFailed(Exception):
    """A rank raised an error, ended early, or did not end in time; the message names the rank and the failure."""


@dataclass(frozen=True)
class Meeting:
    """How the ranks of a test find each other."""

    host: str
    port: int
    world_size: int
    first: int = 0
    """Number of the first rank on this machine."""
    listener: int = -1
    """Descriptor of the socket on which the store listens; -1: the store is on another machine."""
    backend: str = "gloo"
    """Backend of torch.distributed."""
    timeout_s: float = 20.0


LINGER_S = 1.0
"""Longest wait for the answers of the other ranks after one rank has failed, seconds."""
NO_ANSWER, GLOO = "ended without an answer", "gloo"
"""The first is in messages about a rank that was killed, the second about a rank that waited for another rank."""

Work = Callable[[int], Mapping[str, Any]]
"""The work of a rank, called with its number; returns a result in JSON types."""


def listening(host: str = OWN) -> tuple[int, int]:
    """Open a socket for the store of torch.distributed; returns its descriptor and its port."""
    listener = listen(host)
    port = address_of(listener).port
    return listener.detach(), port


def run_ranks(count: int, meeting: Meeting, work: Work, *, within_s: float) -> list[dict[str, Any]]:
    """Fork ranks, connect them, and run their work; returns the result of each rank, in order.

    Args:
        count: Number of ranks on this machine.
        meeting: How the ranks find each other.
        work: The work of each rank once they are connected.
        within_s: All ranks are killed after this time, seconds.

    Raises:
        RanksFailed: a rank failed.
        CannotInspect: a rank reports that it cannot test.
    """
    deadline = time.monotonic() + within_s
    pipes: list[int] = []
    pids: list[int] = []
    try:
        for index in range(count):
            reads, writes = os.pipe()
            to_close = [*pipes, reads, *([meeting.listener] if index and meeting.listener >= 0 else [])]
            pids.append(_forked(index, writes, to_close, meeting, work))
            pipes.append(reads)
            os.close(writes)
        if meeting.listener >= 0:
            os.close(meeting.listener)  # only the first rank has it now, so it is closed when that rank ends
        return _results(pipes, meeting, deadline)
    finally:
        for reads in pipes:
            os.close(reads)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # its exit code was not collected, so no other process can have its pid
        for pid in pids:
            os.waitpid(pid, 0)


def gpu_of(local: int) -> torch.device:
    """Return the device of a rank on this machine: a GPU if there is any, else the processor."""
    import torch

    count = torch.cuda.device_count()
    return torch.device("cuda", local % count) if count else torch.device("cpu")


def _forked(index: int, writes: int, to_close: list[int], meeting: Meeting, work: Work) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for number in to_close:
            os.close(number)
        _write(writes, _worked(meeting.first + index, meeting, work))
    except BaseException as error:  # the code of the parent must not run in this process
        _write(
            writes, {"error": f"{type(error).__name__}: {error}".strip(), "unable": isinstance(error, CannotInspect)}
        )
    os._exit(0)


def _worked(rank: int, meeting: Meeting, work: Work) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=meeting.timeout_s)
    store = TCPStore(
        meeting.host,
        meeting.port,
        meeting.world_size,
        is_master=meeting.listener >= 0 and rank == meeting.first,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=meeting.listener if meeting.listener >= 0 and rank == meeting.first else None,
    )
    if rank == 0:
        store.set("world size", str(meeting.world_size))
    elif (theirs := int(store.get("world size"))) != meeting.world_size:
        raise CannotInspect(f"the other machine has a world size of {theirs}, this machine of {meeting.world_size}")
    device = gpu_of(rank - meeting.first) if meeting.backend == "nccl" else None
    dist.init_process_group(
        meeting.backend, store=store, rank=rank, world_size=meeting.world_size, timeout=timeout, device_id=device
    )
    result = work(rank)
    dist.barrier()  # the first rank has the store, so it must not end before the others
    return {"result": result}


def _write(descriptor: int, answer: Mapping[str, Any]) -> None:
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(descriptor, data) :]
    os.close(descriptor)


def _results(pipes: list[int], meeting: Meeting, deadline: float) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = []
    failures: list[str] = []
    for index, reads in enumerate(pipes):
        try:
            answers.append(_result(reads, meeting.first + index, deadline))
        except RanksFailed as error:
            failures.append(str(error))
            deadline = min(deadline, time.monotonic() + LINGER_S)
    if failures:
        # If one rank fails, the other ranks fail too, with errors of gloo. So a rank without an answer comes first, and
        # an error of gloo comes last.
        failures.sort(key=lambda text: (NO_ANSWER not in text, GLOO in text))
        raise RanksFailed(failures[0])
    return answers


def _result(reads: int, rank: int, deadline: float) -> dict[str, Any]:
    poll, data = select.poll(), b""
    poll.register(reads, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0 and poll.poll(left_s * 1000):
        part = os.read(reads, 1 << 16)
        data += part
        if not part:
            break
    else:
        raise RanksFailed(f"rank {rank} did not end in time")
    if not data:
        raise RanksFailed(f"rank {rank} {NO_ANSWER}")
    answer = json.loads(data)
    if answer.get("unable"):
        raise CannotInspect(answer["error"])
    if "error" in answer:
        raise RanksFailed(f"rank {rank}: {answer['error']}")
    return dict(answer["result"])
