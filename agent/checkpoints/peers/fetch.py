"""This module fetches a slot from another agent into a checkpoint file of this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from agent.checkpoints.peers.copy_requests import Request, as_header
from agent.checkpoints.peers.parts import Incoming, Parts, connections_for, on_each
from agent.checkpoints.peers.prefault import Prefault
from agent.checkpoints.peers.wire import Wire
from everstep.errors import AgentError, AgentUnreachable, CorruptCheckpoint, WireError
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.file import SlotFile
from everstep.slots.format import ANY_SAVE, SlotHeader, same_save
from everstep.slots.reader import SlotReader

ATTEMPTS = 3
"""After this number of connections in a row that broke without progress, the fetch fails."""
RETRY_S = 0.3
PIECE = 4 << 20

Connect = Callable[[], Wire]


def fetch_slot(
    connect: Connect,
    rank: int,
    step: int,
    file: Literal["own", "backup"],
    into: SlotFile,
    *,
    saved: range = ANY_SAVE,
    connections: int = 1,
) -> int:
    """Copy a slot from another agent into a file of this machine, and verify it; a broken transfer is resumed.

    Args:
        connect: Connects to the agent that holds the copy.
        rank: Rank that saved the state.
        step: Completed steps of the state.
        file: Kind of the file at the other agent: its rank's own file, or a backup.
        into: File of this machine for the states of that rank. Until the copy is verified, only its least needed slot
            is changed.
        saved: The times of the save, nanoseconds; empty: any save of the step is accepted.
        connections: The most connections over which the slot is fetched at once.

    Returns:
        The bytes of the payload.

    Raises:
        CorruptCheckpoint: the copy is damaged or missing, or belongs to another save.
        AgentUnreachable: the agent or the network does not answer.
        CheckpointError: there is no room on this machine.
    """
    fetch = _Fetch(into, saved)
    failures = 0
    while True:
        before = fetch.done
        try:
            with contextlib.ExitStack() as opened:
                lead = opened.enter_context(contextlib.closing(connect()))
                size = fetch.begin(lead, Request(rank=rank, step=step, file=file, length=0))
                more = range(1, connections_for(size, connections))
                wires = [lead, *(opened.enter_context(contextlib.closing(connect())) for _ in more)]
                fetch.receive_from(wires, Request(rank=rank, step=step, file=file))
            return fetch.commit()
        except CorruptCheckpoint:
            fetch.give_up()
            raise
        except (OSError, AgentError) as error:
            failures = failures + 1 if fetch.done == before else 1
            if failures >= ATTEMPTS:
                fetch.give_up()
                raise AgentUnreachable(f"step {step} of rank {rank} cannot be fetched: {error}") from error
            time.sleep(RETRY_S)
        except BaseException:
            fetch.give_up()
            raise


class _Fetch:
    """The fetch of a slot, over one attempt or several."""

    def __init__(self, into: SlotFile, saved: range) -> None:
        self._into = into
        self._saved = saved
        self._incoming: Incoming | None = None
        self._ahead: Prefault | None = None

    @property
    def done(self) -> int:
        """The number of bytes that have arrived."""
        return self._incoming.done if self._incoming else 0

    def begin(self, wire: Wire, request: Request) -> int:
        """Begin, or continue after a cut; ``request`` asks for the header only. Returns the bytes of the payload."""
        header = ask(wire, request)
        check_save(header, self._saved, f"the {request.file} slot of rank {request.rank} elsewhere")
        if self._incoming is None or header != self._incoming.header:
            if self.done:
                self.give_up()
                raise ConnectionError(f"step {request.step} of rank {request.rank} was saved anew: begin anew")
            self._let_go()  # from an attempt that ended before its first byte
            self._incoming = Incoming(header, self._into.receive(header, allocate=False))
            self._ahead = Prefault(self._into, header.payload_bytes)
        return header.payload_bytes

    def receive_from(self, wires: Sequence[Wire], request: Request) -> None:
        """Receive what is missing, over all connections at once; ``request`` is for the complete payload."""
        assert self._incoming
        parts = Parts(self._incoming.missing())

        def receive(wire: Wire) -> None:
            while part := parts.take():
                self._receive_part(wire, request, *part)

        on_each(wires, receive)

    def _receive_part(self, wire: Wire, request: Request, at: int, stop: int) -> None:
        incoming, start = self._incoming, at
        assert incoming
        if ask(wire, request.model_copy(update={"offset": at, "length": stop - at})) != incoming.header:
            raise ConnectionError(f"step {request.step} of rank {request.rank} was saved anew while it was sent")
        with incoming.room(at, stop) as room:
            while at < stop:
                count = wire.receive_chunk(room[at - start :], partial(self._reach, at))
                if count == 0:
                    raise CorruptCheckpoint(
                        f"step {request.step} of rank {request.rank} was overwritten while it was sent"
                    )
                incoming.arrived(at, at + count)
                at += count

    def _reach(self, at: int, length: int) -> None:
        assert self._ahead
        self._ahead.reach(at + length)

    def commit(self) -> int:
        assert self._incoming
        header, checksum = self._incoming.header, self._incoming.checksum()
        self._let_go()
        self._into.commit_received(header, checksum)
        return header.payload_bytes

    def give_up(self) -> None:
        self._let_go()
        self._into.abort()

    def _let_go(self) -> None:
        if self._ahead:
            self._ahead.close()
        self._ahead = None
        if self._incoming:
            self._incoming.view.release()
        self._incoming = None


def copy_slot(path: Path, step: int, into: SlotFile, *, saved: range = ANY_SAVE) -> int:
    """Copy a slot from another file of this machine, and verify it; returns the bytes of its payload.

    Raises:
        CorruptCheckpoint: the copy is damaged or missing, or was not saved at one of these times.
        CheckpointError: there is no room on this machine.
    """
    try:
        reader = SlotReader(path, into.owner)
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error
    with contextlib.closing(reader):
        header = reader.header(step)
        if header is None:
            raise CorruptCheckpoint(f"{path} does not hold step {step}")
        check_save(header, saved, str(path))
        view, done, checksum = into.receive(header, allocate=False), 0, PayloadChecksum()
        with view, contextlib.closing(Prefault(into, header.payload_bytes)) as ahead:
            while room := view[done : done + PIECE]:
                ahead.reach(done + len(room))
                count = reader.read_into(header, done, room)
                if count == 0:
                    break
                checksum.update(room[:count])
                done += count
        into.commit_received(header, checksum)
        return done


def check_save(header: SlotHeader, saved: range, where: str) -> None:
    """Refuse a copy that is not the chosen save of its step.

    Raises:
        CorruptCheckpoint: the copy was not saved at one of the times.
    """
    if not same_save(header, saved):
        raise CorruptCheckpoint(
            f"{where} holds another save of step {header.completed_steps} than the one that was chosen: "
            f"generation {header.generation}'s, of {header.saved_ns} ns and not {saved.start} to {saved.stop - 1} ns"
        )


def ask(wire: Wire, request: Request) -> SlotHeader:
    """Request a payload; returns its header, which is sent first.

    Raises:
        CorruptCheckpoint: the other agent does not hold the slot.
    """
    wire.send(request.model_dump())
    reply = wire.receive()
    if "gone" in reply:
        raise CorruptCheckpoint(str(reply["gone"]))
    return as_header(reply.get("header"))


def fetch_range(connect: Connect, rank: int, step: int, view: memoryview) -> SlotHeader:
    """Fill ``view`` with the first bytes of an own slot's payload at another agent, without verification.

    Raises:
        CorruptCheckpoint: the slot is missing, was overwritten during the transfer, or is shorter than ``view``.
        AgentUnreachable: the agent or the network does not answer.
    """
    try:
        with contextlib.closing(connect()) as wire:
            header = ask(wire, Request(rank=rank, step=step, file="own", length=len(view)))
            if header.payload_bytes < len(view):
                raise CorruptCheckpoint(f"step {step} of rank {rank} has {header.payload_bytes} bytes: too few")
            done = 0
            while room := view[done:]:
                count = wire.receive_chunk(room)
                if count == 0:
                    raise CorruptCheckpoint(f"step {step} of rank {rank} was overwritten while it was sent")
                done += count
            return header
    except (OSError, WireError) as error:
        raise AgentUnreachable(f"step {step} of rank {rank} cannot be fetched: {error}") from error
