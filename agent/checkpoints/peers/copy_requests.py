"""This module has the messages before the transfer of a copy (offers, requests, headers, parts), and validates them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.checkpoints.peers.wire import Message
from everstep.errors import WireError
from everstep.slots.format import SlotHeader

LARGEST = 1 << 46
"""The largest size in a header that is accepted, bytes; no shard is larger than 64 TiB."""


class Header(BaseModel):
    """A slot's header as JSON."""

    model_config = ConfigDict(strict=True)

    completed_steps: int = Field(ge=0, lt=1 << 62)
    generation: int = Field(ge=0, lt=1 << 31)
    tensor_bytes: int = Field(ge=0, le=LARGEST)
    structure_bytes: int = Field(ge=0, le=LARGEST)
    checksum: int = Field(ge=0, lt=1 << 64)
    saved_ns: int = Field(ge=0, lt=1 << 63)


class Offer(BaseModel):
    """The message of a PUT: a sender offers a copy for this machine to keep."""

    model_config = ConfigDict(strict=True)

    op: Literal["put"] = "put"
    machine: str = Field(max_length=200)
    """Name of the sender's machine."""
    rank: int = Field(ge=0, lt=1 << 31)
    generation: int = Field(ge=1, lt=1 << 31)
    """The generation that the sender runs."""
    resume_step: int = Field(ge=-1, lt=1 << 62)
    """The step at which that generation began."""
    slots: int = Field(ge=2, le=8)
    keep: int = Field(0, ge=0, lt=1 << 62)
    """A step that is held and that a restart may need, so the new copy must replace a later step; 0: there is none."""
    header: Header


class PartHeader(BaseModel):
    """The message before each part of a PUT, and after the last one."""

    model_config = ConfigDict(strict=True)

    start: int = Field(-1, ge=-1, le=2 * LARGEST)
    """The first byte of the part; -1: this connection carries no more parts."""
    stop: int = Field(-1, ge=-1, le=2 * LARGEST)
    """The byte after the last one."""
    gone: bool = False
    """The copy is given up, because the slot was overwritten meanwhile."""


class Join(BaseModel):
    """The message of a further connection of a PUT, which carries parts of the copy too."""

    model_config = ConfigDict(strict=True)

    op: Literal["join"] = "join"
    rank: int = Field(ge=0, lt=1 << 31)
    transfer: int = Field(ge=0, lt=1 << 64)
    """The number in the answer to the PUT."""


class Request(BaseModel):
    """The message of a GET: a machine needs the payload of a slot, or a part of the payload."""

    model_config = ConfigDict(strict=True)

    op: Literal["get"] = "get"
    rank: int = Field(ge=0, lt=1 << 31)
    step: int = Field(ge=0, lt=1 << 62)
    file: Literal["own", "backup"]
    offset: int = Field(0, ge=0, le=2 * LARGEST)
    length: int = Field(-1, ge=-1, le=2 * LARGEST)
    """The number of bytes from ``offset`` on; -1: all remaining bytes."""


def as_message(header: SlotHeader) -> Message:
    """Format a header as a message."""
    return asdict(header)


def as_header(message: object) -> SlotHeader:
    """Parse a header from a message.

    Raises:
        WireError: the header is not valid.
    """
    try:
        return SlotHeader(**Header.model_validate(message).model_dump())
    except ValidationError as error:
        raise WireError(f"a header is not valid: {error.errors()[0]['msg']}") from error


def as_part(message: Message) -> PartHeader:
    """Parse a message before a part.

    Raises:
        WireError: the message is not valid.
    """
    try:
        return PartHeader.model_validate(message)
    except ValidationError as error:
        raise WireError(f"a part of a copy is not valid: {error.errors()[0]['msg']}") from error


def parse(message: Message) -> Offer | Join | Request:
    """Parse the message with which a client begins.

    Raises:
        WireError: the message is none of these.
    """
    kinds: dict[object, type[Offer | Join | Request]] = {"put": Offer, "join": Join, "get": Request}
    kind = kinds.get(message.get("op"))
    if kind is None:
        raise WireError(f"a request for {str(message.get('op'))[:40]!r}, which does not exist")
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        first = error.errors()[0]
        raise WireError(f"{'.'.join(map(str, first['loc']))} of a request is not valid: {first['msg']}") from error
