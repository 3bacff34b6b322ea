"""This module sends one slot to another agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from agent.checkpoints.peers.copy_requests import Join, Offer, PartHeader
from agent.checkpoints.peers.parts import Parts, connections_for, on_each
from agent.checkpoints.peers.rate_limit import Limiter
from agent.checkpoints.peers.wire import SILENT_S, Message, Wire
from everstep.errors import WireError
from everstep.slots.format import SlotHeader
from everstep.slots.reader import SlotReader

ALLOCATE_BYTES_PER_S = 250e6
"""The rate that a peer must reach when it allocates memory, bytes per second. Measurements gave 300 MB/s on a machine
that had never used the pages, and 1.9 GB/s otherwise."""

VERIFY_BYTES_PER_S = 1e9
"""The rate at which a peer must at least verify a slot that has arrived, bytes per second."""


class Fate(Enum):
    """The outcomes of an offered slot."""

    KEPT = "complete and verified at the peer"
    GONE = "overwritten before it was all sent"
    REFUSED = "refused by the peer"
    DAMAGED = "its bytes in our own memory do not match the checksum that the rank stored"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an offered slot, its reason, and the bytes that were sent."""

    fate: Fate
    reason: str = ""
    newest: int = -1
    """The step that the peer holds already, if it refused for this reason."""
    bytes: int = 0


class PeerConnection(NamedTuple):
    """One of the connections over which a slot is sent."""

    wire: Wire
    buffer: memoryview
    """Memory for the piece that is sent; its size is the largest size of a piece."""


Connected = Callable[[int], Sequence[PeerConnection]]
"""``connected(count)``: return this many connections to the peer; the first one is always the same."""


def put(
    connected: Connected,
    reader: SlotReader,
    header: SlotHeader,
    offer: Offer,
    *,
    connections: int = 1,
    limits: Sequence[Limiter] = (),
    closing: threading.Event | None = None,
) -> Outcome:
    """Offer a slot, and send the bytes that the peer lacks over several connections at once; the peer verifies it.

    Args:
        connected: Makes connections. Further ones are made when they are needed, because the peer closes a connection
            that does not begin soon.
        reader: The slot's file.
        header: Header of the slot.
        offer: The offer, with the same header.
        connections: The most connections that are used.
        limits: Limits of the rate; all of them hold.
        closing: Ends the wait for the limits.

    Raises:
        OSError, WireError: a connection broke, and all are unusable now; the peer keeps the received parts, and needs
            only the others at the next offer.
    """
    lead = connected(1)[0].wire
    lead.send(offer.model_dump())
    reply = lead.receive()
    if reply.get("allocating"):
        lead.set_patience(SILENT_S + header.payload_bytes * offer.slots / ALLOCATE_BYTES_PER_S)
        reply = lead.receive()
        lead.set_patience(SILENT_S)
    if "missing" not in reply:
        return _refusal(reply)
    sending = _Sending(reader, header, reply, limits, closing or threading.Event())
    if not reply.get("held"):
        opened = connected(connections_for(sending.bytes, connections))
        buffers = {one.wire: one.buffer for one in opened}
        join = Join(rank=offer.rank, transfer=int(reply.get("transfer", 0)))
        on_each(list(buffers), lambda wire: sending.run(wire, buffers[wire], None if wire is lead else join))
        lead.send(PartHeader(gone=sending.gone.is_set()).model_dump())
        if sending.gone.is_set():
            return _why_short(reader, header)
    lead.set_patience(SILENT_S + header.payload_bytes / VERIFY_BYTES_PER_S)
    reply = lead.receive()
    lead.set_patience(SILENT_S)
    if reply.get("ok"):
        return Outcome(Fate.KEPT, bytes=sending.bytes)
    if "damaged" in reply:
        return _why_damaged(reader, header)
    return _refusal(reply)


class _Sending:
    """Sends the missing parts of a slot; several connections may run it at the same time."""

    def __init__(
        self,
        reader: SlotReader,
        header: SlotHeader,
        reply: Message,
        limits: Sequence[Limiter],
        closing: threading.Event,
    ) -> None:
        missing = [(int(start), int(stop)) for start, stop in reply["missing"]]
        self.bytes = sum(stop - start for start, stop in missing)
        """The number of bytes to send."""
        self.gone = threading.Event()
        """Set when the slot was overwritten."""
        self._parts = Parts(missing)
        self._reader = reader
        self._header = header
        self._limits = limits
        self._closing = closing

    def run(self, wire: Wire, buffer: memoryview, join: Join | None) -> None:
        """Send parts over a connection until none is left, or the slot is gone.

        Args:
            wire: The connection.
            buffer: Memory for a piece.
            join: The message with which the connection joins the transfer; None: it has offered the slot.
        """
        if join:
            wire.send(join.model_dump())
            if "joined" not in (reply := wire.receive()):
                raise WireError(f"a further connection is refused: {reply.get('refused', 'no reason given')}")
        while not self.gone.is_set() and (part := self._parts.take()):
            self._send(wire, buffer, *part)
        if join:
            wire.send(PartHeader().model_dump())
            wire.receive()

    def _send(self, wire: Wire, buffer: memoryview, at: int, stop: int) -> None:
        wire.send(PartHeader(start=at, stop=stop).model_dump())
        piece = buffer[: min(limit.piece(len(buffer)) for limit in self._limits)] if self._limits else buffer
        while at < stop:
            wanted = piece[: stop - at]
            if delay := max((limit.delay(len(wanted)) for limit in self._limits), default=0.0):
                self._closing.wait(delay)
            count = 0 if self.gone.is_set() else self._reader.read_into(self._header, at, wanted)
            if count == 0:
                self.gone.set()
                wire.give_up()
                return
            wire.send_chunk(piece[:count])
            at += count


def _why_short(reader: SlotReader, header: SlotHeader) -> Outcome:
    if reader.header(header.completed_steps) == header:
        return Outcome(Fate.DAMAGED, "it is cut short in its own memory")
    return Outcome(Fate.GONE, "the rank needed the slot")


def _why_damaged(reader: SlotReader, header: SlotHeader) -> Outcome:
    if reader.intact(header):
        return Outcome(Fate.REFUSED, "it was damaged on its way")
    if reader.header(header.completed_steps) == header:
        return Outcome(Fate.DAMAGED, "it is damaged in its own memory")
    return Outcome(Fate.GONE, "the rank wrote into the slot meanwhile")


def _refusal(reply: Message) -> Outcome:
    return Outcome(Fate.REFUSED, str(reply.get("refused", "no reason given")), int(reply.get("newest", -1)))
