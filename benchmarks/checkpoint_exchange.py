"""Measures how fast agents exchange slots over the loopback interface, and the CPU time of both ends.

The agents' own code runs in this process and in another process. It transfers slots from ``/dev/shm`` to ``/dev/shm``
and verifies them. The peers are a plain copy in memory and a bare socket.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import structlog

from agent.checkpoints.peers.backups import PeerBackups
from agent.checkpoints.peers.copy_requests import Header, Offer, as_message
from agent.checkpoints.peers.data_port import DataPort, Tokens
from agent.checkpoints.peers.fetch import fetch_slot
from agent.checkpoints.peers.send_slot import Fate, PeerConnection, put
from agent.checkpoints.peers.wire import Wire, connect
from benchmarks import forks
from benchmarks.checkpoint_saves import scratch
from benchmarks.common import Row, Spread, say
from benchmarks.peers import copies
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader

AIM_GB_S = 1.0
JOB = "bench"
WARM = 2
"""Number of first transfers that are not counted: after them both slots of a backup have memory."""
CHUNK = 4_000_000
"""Size of a piece of a backup, bytes: the default of ``backup_chunk_mb``."""
MEMCPY, SOCKET, BACKUP, FETCH, FETCH_NEW = (
    "memcpy",
    "bare socket",
    "backup",
    "fetch into a warm file",
    "fetch into a new file",
)


@dataclass(slots=True)
class Transfers:
    """The measurements of each way of transfer."""

    megabytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """CPU seconds of this process and of the other process."""

    def rate(self, way: str) -> float:
        """Return the median rate, GB/s."""
        return self.megabytes / 1e3 / Spread.of(self.seconds[way]).median

    def rows(self) -> list[Row]:
        """Rates compared with the aim and with the other ways."""
        name = f"backup of {self.megabytes} MB"
        rows = [Row(f"{name}, verified", "GB/s", self.rate(BACKUP), None, AIM_GB_S, "ours", larger=True)]
        rows += [Row(f"{name}, {way}", "GB/s", self.rate(BACKUP), self.rate(way), larger=True) for way in _BARE]
        rows += [
            Row(f"{way} from the peer, rate of backups", "GB/s", self.rate(way), self.rate(BACKUP), 1.0, larger=True)
            for way in (FETCH, FETCH_NEW)
        ]
        gigabytes = self.megabytes / 1e3
        for way in (BACKUP, SOCKET):
            ends = [Spread.of([cpu[end] / gigabytes for cpu in self.cpu[way]]).median for end in (0, 1)]
            rows.append(Row(f"CPU of a {way}, sender (ours) and receiver (peer)", "s/GB", ends[0], ends[1]))
        return rows

    def table(self) -> str:
        """Return a table with a line for each way."""
        lines = [f"{self.megabytes} MB between two processes   median s     p90     max    GB/s"]
        for way, seconds in self.seconds.items():
            spread = Spread.of(seconds)
            numbers = f"{spread.median:7.3f} {spread.p90:7.3f} {spread.maximum:7.3f} {self.rate(way):7.2f}"
            lines.append(f"  {way:32} {numbers}")
        return "\n".join(lines)


_BARE = (MEMCPY, SOCKET)


def measure(megabytes: int, *, runs: int) -> Transfers:
    """Measure all ways in turn."""
    with scratch() as folder:
        (folder / "peer").mkdir()
        other = forks.Forked(_serve, folder / "peer", megabytes, runs + WARM)
        try:
            return _measure(folder, other, megabytes, runs)
        finally:
            other.close()


def _measure(folder: Path, other: forks.Forked, megabytes: int, runs: int) -> Transfers:
    port, bare_port, token = other.result()
    found = Transfers(megabytes)
    size = megabytes * 1_000_000
    source, target = copies.Mapped(folder / "from", size), copies.Mapped(folder / "to", size)
    own = _own_file(folder / "checkpoint-0", size)
    reader = SlotReader(own.path)
    owner = own.owner
    warm = SlotFile(folder / "checkpoint-1", slots=2, owner=owner)
    buffer = memoryview(bytearray(CHUNK))

    def link() -> Wire:
        return connect(port, JOB, token)

    with contextlib.closing(link()) as wire, copies.Sender(bare_port, source) as bare:

        def backup(step: int) -> None:
            header = reader.header(step)
            assert header
            offer = Offer(
                machine="m0", rank=0, generation=1, resume_step=0, slots=2, header=Header(**as_message(header))
            )
            outcome = put(lambda _: [PeerConnection(wire, buffer)], reader, header, offer)
            if outcome.fate is not Fate.KEPT:
                raise RuntimeError(f"a backup was not kept: {outcome.fate.value} {outcome.reason}")

        def fetch_new(step: int) -> None:
            with contextlib.closing(SlotFile(folder / "checkpoint-2", slots=3, owner=owner)) as into:
                fetch_slot(link, 0, step, "backup", into)

        ways: dict[str, Callable[[int], object]] = {
            MEMCPY: lambda _: copies.memcpy(source, target),
            SOCKET: lambda _: bare.send(),
            BACKUP: backup,
            FETCH: lambda step: fetch_slot(link, 0, step, "backup", warm),
            FETCH_NEW: fetch_new,
        }
        for step in range(1, runs + WARM + 1):
            own.begin(b"", size)
            own.commit(step)
            for way, do in ways.items():
                cpu_here, cpu_there, began = time.process_time(), other.ask(), time.perf_counter()
                do(step)
                taken = time.perf_counter() - began
                cpu = (time.process_time() - cpu_here, other.ask() - cpu_there)
                if step > WARM:
                    found.seconds.setdefault(way, []).append(taken)
                    found.cpu.setdefault(way, []).append(cpu)
            (folder / "checkpoint-2").unlink()
    say(", ".join(f"{way} {found.rate(way):.2f} GB/s" for way in found.seconds))
    return found


def _own_file(path: Path, size: int) -> SlotFile:
    """Make a rank's checkpoint file with filled slots."""
    file = SlotFile(path, slots=2)
    for _ in range(file.slots):
        file.begin(b"", size)
        with file.tensors() as view:
            view[:] = bytes(range(256)) * (size // 256) + bytes(size % 256)
        file.commit(0)
    return file


def _serve(pipe: Connection, shm: Path, megabytes: int, count: int) -> None:
    """Run the data port of the peer's agent, and a bare socket; answer each question with this process's CPU
    seconds."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    received = PeerBackups(shm, partial(SlotOwner, "", ""))
    tokens = Tokens()
    token = tokens.issue(JOB)
    port = DataPort(["127.0.0.1"], tokens)
    port.start(lambda _: received)
    target = copies.Mapped(shm / "bare", megabytes * 1_000_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=copies.receive, args=(listener, target, count), daemon=True).start()
        forks.answer(pipe, (port.addresses[0], listener.getsockname()[1], token))
        with contextlib.suppress(EOFError):
            while True:
                pipe.recv()
                forks.answer(pipe, time.process_time())
    port.close()
    received.close()
