"""This module sends blocks of known bytes over TCP. The receiver compares and counts them, and measures the time."""

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
    """The received blocks."""

    bytes: int
    seconds: float
    """Time from the first block to the last."""
    wrong: int
    """Number of blocks that differ from the sent blocks."""

    @property
    def bytes_per_second(self) -> float:
        """The mean bandwidth."""
        return self.bytes / self.seconds if self.seconds else 0.0


def hello(secret: str, position: int) -> bytes:
    """Return the first bytes that one end sends, by which the other end recognises it."""
    return hmac.digest(secret.encode(), f"everstep nic test {position}".encode(), "sha256")


def greet(connection: socket.socket, secret: str, position: int) -> None:
    """Prove that this end knows the secret, and check that the other end knows it too.

    Raises:
        CannotInspect: the other end does not know the secret.
    """
    connection.sendall(hello(secret, position))
    theirs = _read(connection, memoryview(bytearray(HELLO_BYTES)))
    if theirs is None or not hmac.compare_digest(bytes(theirs), hello(secret, 1 - position)):
        raise CannotInspect("another program is at the other end of the connection")


def send(connection: socket.socket, seconds: float, most_bytes: float) -> None:
    """Send numbered blocks for some seconds, but at least one block, and then an end mark."""
    block = bytearray(_NUMBER.pack(0) + _PATTERN[_NUMBER.size :])
    ends, number = time.monotonic() + seconds, 0
    while number == 0 or (time.monotonic() < ends and (number + 1) * BLOCK <= most_bytes):
        number += 1
        _NUMBER.pack_into(block, 0, number)
        connection.sendall(block)
    _NUMBER.pack_into(block, 0, 0)
    connection.sendall(block)


def receive(connection: socket.socket) -> Received:
    """Receive blocks up to the end mark.

    Raises:
        ConnectionError: the connection ended before the end mark.
    """
    buffer, rest = memoryview(bytearray(BLOCK)), _PATTERN[_NUMBER.size :]
    number, wrong, began, seconds = 0, 0, 0.0, 0.0
    while True:
        if _read(connection, buffer) is None:
            raise ConnectionError(f"the connection ended after {number} blocks")
        [received_number] = _NUMBER.unpack_from(buffer)
        is_intact = bytes(buffer[_NUMBER.size :]) == rest  # comparing the view itself would be ten times slower
        if received_number == 0 and is_intact:
            return Received(number * BLOCK, seconds, wrong)
        number += 1
        began = began or time.monotonic()
        seconds = time.monotonic() - began
        wrong += not (is_intact and received_number == number)


def _read(connection: socket.socket, buffer: memoryview) -> memoryview | None:
    """Fill a buffer and return it; None: the connection ended before the buffer was full."""
    filled = 0
    while filled < len(buffer):
        count = connection.recv_into(buffer[filled:])
        if count == 0:
            return None
        filled += count
    return buffer
