"""Bytes over TCP from one end to another: counted, timed, and each block compared with what was sent."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from dataclasses import dataclass

from everstep.errors import CannotInspect

BLOCK = 1 << 20
_PATTERN = hashlib.shake_128(b"everstep").digest(BLOCK)
_NUMBER = struct.Struct("<Q")
HELLO_BYTES = 32


@dataclass(frozen=True, slots=True)
class Received:
    """What came."""

    bytes: int
    seconds: float
    """From the first block to the last one."""
    wrong: int
    """Blocks that are not as they were sent."""

    @property
    def bytes_per_second(self) -> float:
        """Over the whole time."""
        return self.bytes / self.seconds if self.seconds else 0.0


def hello(secret: str, position: int) -> bytes:
    """The first bytes of one end, so that it talks with no other program."""
    return hmac.digest(secret.encode(), f"everstep nic test {position}".encode(), "sha256")


def greet(connection: socket.socket, secret: str, position: int) -> None:
    """Each end says that it knows the secret.

    Raises:
        CannotInspect: the other one does not.
    """
    connection.sendall(hello(secret, position))
    theirs = _read(connection, memoryview(bytearray(HELLO_BYTES)))
    if theirs is None or not hmac.compare_digest(bytes(theirs), hello(secret, 1 - position)):
        raise CannotInspect("somebody else is at the other end")


def send(connection: socket.socket, seconds: float, most_bytes: float) -> None:
    """Send numbered blocks for so long, one at least, and say that this is the end of them."""
    block = bytearray(_NUMBER.pack(0) + _PATTERN[_NUMBER.size :])
    ends, number = time.monotonic() + seconds, 0
    while number == 0 or (time.monotonic() < ends and (number + 1) * BLOCK <= most_bytes):
        number += 1
        _NUMBER.pack_into(block, 0, number)
        connection.sendall(block)
    _NUMBER.pack_into(block, 0, 0)
    connection.sendall(block)


def receive(connection: socket.socket) -> Received:
    """Receive blocks up to the end of them.

    Raises:
        ConnectionError: the other end went away before.
    """
    buffer, rest = memoryview(bytearray(BLOCK)), _PATTERN[_NUMBER.size :]
    number, wrong, began, seconds = 0, 0, 0.0, 0.0
    while True:
        if _read(connection, buffer) is None:
            raise ConnectionError(f"the connection ended after {number} blocks")
        [said] = _NUMBER.unpack_from(buffer)
        fine = bytes(buffer[_NUMBER.size :]) == rest  # a view is compared byte by byte, ten times as slowly
        if said == 0 and fine:
            return Received(number * BLOCK, seconds, wrong)
        number += 1
        began = began or time.monotonic()
        seconds = time.monotonic() - began
        wrong += not (fine and said == number)


def _read(connection: socket.socket, buffer: memoryview) -> memoryview | None:
    """Fill a buffer; None: the connection ended before."""
    filled = 0
    while filled < len(buffer):
        count = connection.recv_into(buffer[filled:])
        if count == 0:
            return None
        filled += count
    return buffer
