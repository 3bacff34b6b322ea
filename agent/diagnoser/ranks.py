"""Processes that communicate through torch.distributed, for one test: forked, watched, and killed together.

They are children of the test's process, which has imported torch and never touched a GPU or run a second thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from everstep.errors import CannotInspect

if TYPE_CHECKING:
    import torch

PR_SET_PDEATHSIG = 1
OWN = "127.0.0.1"
WITHIN = {"GLOO_SOCKET_IFNAME": "lo"}
"""Ranks of one machine meet through its own interface, whatever the state of the others."""


class RanksFailed(Exception):
    """A rank raised, ended, or did not end in time; the message says which and how."""


@dataclass(frozen=True)
class Meeting:
    """How the ranks of a test find each other."""

    host: str
    port: int
    world_size: int
    first: int = 0
    """Rank of the first process here."""
    listener: int = -1
    """Descriptor of the socket on which the store listens; -1: it is on another machine."""
    backend: str = "gloo"
    """Backend of torch.distributed."""
    timeout_s: float = 20.0


GOES_ON_S = 1.0
"""Once a rank failed, the others have so long to say what they saw, seconds."""
WORDLESS, GLOO = "ended without a word", "gloo"
"""In what is said of a rank that was killed, and of one that waited for another one."""

Work = Callable[[int], Mapping[str, Any]]
"""What a rank does, with its number; returns what JSON can say."""


def listening(host: str = OWN) -> tuple[int, int]:
    """Open a socket for the store of a test; returns its descriptor and its port."""
    family = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host.strip("[]"), 0), family=family)
    port = int(listener.getsockname()[1])
    return listener.detach(), port


def run_ranks(count: int, meeting: Meeting, work: Work, *, within_s: float) -> list[dict[str, Any]]:
    """Fork processes, let them meet and work; returns what each says, in order.

    Args:
        count: Processes on this machine.
        meeting: Where they meet.
        work: What each does once they have met.
        within_s: All are killed after this time.

    Raises:
        RanksFailed: one did not do its work.
    """
    deadline = time.monotonic() + within_s
    pipes: list[int] = []
    pids: list[int] = []
    try:
        for index in range(count):
            reads, writes = os.pipe()
            others = [*pipes, reads, *([meeting.listener] if index and meeting.listener >= 0 else [])]
            pids.append(_forked(index, writes, others, meeting, work))
            pipes.append(reads)
            os.close(writes)
        if meeting.listener >= 0:
            os.close(meeting.listener)  # once its rank is gone, nothing waits there
        return _all_said(pipes, meeting, deadline)
    finally:
        for reads in pipes:
            os.close(reads)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # not collected yet: the number is still its own
        for pid in pids:
            os.waitpid(pid, 0)


def gpu_of(local: int) -> torch.device:
    """Return the device of a rank on this machine: a GPU if there is any, else the processor."""
    import torch

    count = torch.cuda.device_count()
    return torch.device("cuda", local % count) if count else torch.device("cpu")


def _forked(index: int, writes: int, others: list[int], meeting: Meeting, work: Work) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for number in others:
            os.close(number)
        _write(writes, _worked(meeting.first + index, meeting, work))
    except BaseException as error:  # nothing of the parent's may run here
        _write(
            writes, {"error": f"{type(error).__name__}: {error}".strip(), "unable": isinstance(error, CannotInspect)}
        )
    os._exit(0)


def _worked(rank: int, meeting: Meeting, work: Work) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=meeting.timeout_s)
    store = TCPStore(
        meeting.host.strip("[]"),
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
        raise CannotInspect(f"the other machine has ranks for a world of {theirs}, this one for {meeting.world_size}")
    device = gpu_of(rank - meeting.first) if meeting.backend == "nccl" else None
    dist.init_process_group(
        meeting.backend, store=store, rank=rank, world_size=meeting.world_size, timeout=timeout, device_id=device
    )
    said = work(rank)
    dist.barrier()  # the first rank has the store: it leaves last
    return {"said": said}


def _write(descriptor: int, answer: Mapping[str, Any]) -> None:
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(descriptor, data) :]
    os.close(descriptor)


def _all_said(pipes: list[int], meeting: Meeting, deadline: float) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = []
    failures: list[str] = []
    for index, reads in enumerate(pipes):
        try:
            answers.append(_said(reads, meeting.first + index, deadline))
        except RanksFailed as error:
            failures.append(str(error))
            deadline = min(deadline, time.monotonic() + GOES_ON_S)
    if failures:
        # The others fail because one went away: that one says nothing, or something else than they do.
        failures.sort(key=lambda text: (WORDLESS not in text, GLOO in text))
        raise RanksFailed(failures[0])
    return answers


def _said(reads: int, rank: int, deadline: float) -> dict[str, Any]:
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
        raise RanksFailed(f"rank {rank} {WORDLESS}")
    answer = json.loads(data)
    if answer.get("unable"):
        raise CannotInspect(answer["error"])
    if "error" in answer:
        raise RanksFailed(f"rank {rank}: {answer['error']}")
    return dict(answer["said"])
