"""A data port with the backups of one job, and a network that fails on demand between the port and its clients."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from agent.checkpoints.peers.backups import PeerBackups
from agent.checkpoints.peers.copy_requests import Header, Offer, as_message
from agent.checkpoints.peers.data_port import DataPort, Tokens
from agent.checkpoints.peers.send_slot import Connected, PeerConnection
from agent.checkpoints.peers.wire import Wire, connect
from everstep.base.addresses import Address
from everstep.slots.file import SlotFile
from everstep.slots.format import SlotHeader
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader

HOST = "127.0.0.1"
JOB = "gpt"
OWNER = partial(SlotOwner, JOB, "")
"""Rank → the owner of its slots."""


def fresh_shm() -> Path:
    path = Path("/dev/shm") / f"everstep-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    return path


class Side:
    """One machine: shared memory, received backups and a data port."""

    def __init__(self, *, fenced: int = 0) -> None:
        self.shm = fresh_shm()
        self.received = PeerBackups(self.shm, OWNER, fenced)
        self.tokens = Tokens()
        self.port = DataPort([HOST], self.tokens)
        self.address = self.port.addresses[0]
        self.port.start(lambda job: self.received if job == JOB else None)

    def connect(self, through: Network | None = None, *, patience_s: float = 5.0) -> Wire:
        address = Address(HOST, through.port) if through else self.address
        return connect(address, JOB, self.tokens.issue(JOB), patience_s=patience_s)

    def payload(self, rank: int, step: int, prefix: str = "backup") -> bytes:
        """Return the bytes of a held slot. Its headers and its checksum are intact."""
        with contextlib.closing(SlotReader(self.shm / f"{prefix}-{rank}")) as reader:
            header = reader.header(step)
            assert header is not None
            assert reader.intact(header)
            found = bytearray(header.payload_bytes)
            assert reader.read_into(header, 0, memoryview(found)) == len(found)
            return bytes(found)

    def steps(self, rank: int, prefix: str = "backup") -> list[int]:
        path = self.shm / f"{prefix}-{rank}"
        if not path.exists():
            return []
        with contextlib.closing(SlotReader(path)) as reader:
            return [header.completed_steps for header in reader.headers()]

    def close(self) -> None:
        self.port.close()
        self.received.close()
        shutil.rmtree(self.shm)


@contextlib.contextmanager
def side(*, fenced: int = 0) -> Iterator[Side]:
    found = Side(fenced=fenced)
    try:
        yield found
    finally:
        found.close()


def save(path: Path, step: int, data: bytes, *, generation: int = 1, structure: bytes = b"{}") -> SlotHeader:
    """Save a step into a slot, as a rank does; the name of the file says its rank."""
    owner = OWNER(SlotOwner.outside_a_job(path).rank)
    with contextlib.closing(SlotFile(path, slots=3, owner=owner, generation=generation)) as file:
        file.begin(structure, len(data))
        with file.tensors() as view:
            view[:] = data
        return file.commit(step)


def offer(header: SlotHeader, *, rank: int = 0, generation: int = 1, resume_step: int = 0) -> Offer:
    return Offer(
        machine="m1",
        rank=rank,
        generation=generation,
        resume_step=resume_step,
        slots=2,
        header=Header(**as_message(header)),
    )


def only(wire: Wire, piece: int = 20_000) -> Connected:
    """Return what ``put`` needs to send over one connection, in pieces of this size."""
    one = PeerConnection(wire, memoryview(bytearray(piece)))
    return lambda count: [one]


class Network:
    """Passes bytes on to a port. Each connection breaks, or gets a flipped bit, at a chosen byte.

    Args:
        port: The port of the far side.
        breaks: For each connection in turn, after how many bytes it breaks. Later connections do not break.
        flip_at: In the first connection, the number of the byte whose lowest bit is flipped.
        back: Count and spoil the bytes that come from the far side, and not those that go there.
    """

    def __init__(self, port: int, *, breaks: list[int] | None = None, flip_at: int = -1, back: bool = False) -> None:
        self._far = port
        self._breaks = list(breaks or [])
        self._flip_at = flip_at
        self._back = back
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((HOST, self._far))
            limit = self._breaks.pop(0) if self._breaks else -1
            flip, self._flip_at = self._flip_at, -1
            self.connections += 1
            ways = [(near, far, not self._back), (far, near, self._back)]
            for one, other, spoiled in ways:
                args = (one, other, limit if spoiled else -1, flip if spoiled else -1)
                threading.Thread(target=self._pass_on, args=args, daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, limit: int, flip: int) -> None:
        done = 0
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if 0 <= flip - done < len(data):
                    spoiled = bytearray(data)
                    spoiled[flip - done] ^= 1
                    data = bytes(spoiled)
                if limit >= 0 and done + len(data) >= limit:
                    other.sendall(data[: limit - done])
                    break
                other.sendall(data)
                done += len(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        other.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
