"""This module sends one slot to another agent."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from agent.checkpoints.peers.copy_requests import Offer
from agent.checkpoints.peers.rate_limit import Limiter
from agent.checkpoints.peers.wire import SILENT_S, Message, Wire
from everstep.slots.format import SlotHeader
from everstep.slots.reader import SlotReader

ALLOCATE_BYTES_PER_S = 250e6
"""The rate that a peer must reach when it allocates memory, bytes per second. Measurements gave 300 MB/s on a machine
that had never used the pages, and 1.9 GB/s otherwise."""


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


def put(
    wire: Wire,
    reader: SlotReader,
    header: SlotHeader,
    offer: Offer,
    *,
    buffer: memoryview,
    limiter: Limiter | None = None,
    closing: threading.Event | None = None,
) -> Outcome:
    """Offer a slot and send the bytes that the peer lacks, in pieces of the buffer's size; the peer verifies the slot.

    Raises:
        OSError, WireError: the connection broke; the peer keeps the received part, and resumes there at the next offer.
    """
    wire.send(offer.model_dump())
    reply = wire.receive()
    if reply.get("allocating"):
        wire.set_patience(SILENT_S + header.payload_bytes * offer.slots / ALLOCATE_BYTES_PER_S)
        reply = wire.receive()
        wire.set_patience(SILENT_S)
    if "have" not in reply:
        return _refusal(reply)
    start = at = int(reply["have"])
    size = header.payload_bytes
    piece = buffer[: limiter.piece(len(buffer))] if limiter else buffer
    while at < size and not reply.get("held"):
        if limiter and (delay := limiter.delay(min(len(piece), size - at))):
            (closing or threading.Event()).wait(delay)
        count = reader.read_into(header, at, piece)
        if count == 0:
            wire.give_up()
            return _why_short(reader, header)
        wire.send_chunk(piece[:count])
        at += count
    reply = wire.receive()
    if reply.get("ok"):
        return Outcome(Fate.KEPT, bytes=at - start)
    if "damaged" in reply:
        return _why_damaged(reader, header)
    return _refusal(reply)


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
