"""This module has a connection to a data port, which transfers authenticated messages, and payload in chunks.

Both sides know the job's token from gRPC. The server sends a magic number and a nonce; the client sends the name of the
job and a nonce of its own. The key of the connection is an HMAC of all of these under the token. A message is ``u32
length | JSON | HMAC``, and its HMAC covers direction, number and JSON. So without the token, messages cannot be made,
altered, reordered or repeated. The payload is not encrypted; the slot's checksum protects it against errors.

A payload, or a part of it, consists of chunks ``u32 length | bytes``. A length of 0 means that no more of it follows,
because the slot was overwritten meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from everstep.base.addresses import Address
from everstep.decisions.keep.choose_card import Card
from everstep.errors import WireError

MAGIC = b"EVSTXCH1"
NONCE_BYTES = 32
MAC_BYTES = 32
MESSAGE_LIMIT = 64 << 10
"""The largest message that is accepted, bytes; all messages are much smaller."""
CHUNK_LIMIT = 256 << 20
SILENT_S = 10.0
"""A connection without progress for this long is closed, seconds."""
_U32 = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")

Message = dict[str, Any]


class Wire:
    """A connection after its handshake. A single thread uses it; any thread may ``cut`` it."""

    def __init__(self, connection: socket.socket, key: bytes, *, client: bool) -> None:
        self._socket = connection
        self._key = key
        self._mine, self._theirs = (b"c", b"s") if client else (b"s", b"c")
        self._sent = self._received = 0

    def send(self, message: Message) -> None:
        """Send a message."""
        body = json.dumps(message).encode()
        self._send(_U32.pack(len(body)) + body + self._mac(self._mine, self._sent, body))
        self._sent += 1

    def receive(self) -> Message:
        """Receive the next message.

        Raises:
            WireError: the message is too long, not authentic, or no JSON object.
            ConnectionError, TimeoutError: the other side closed the connection, or is silent.
        """
        length = self._length()
        if length > MESSAGE_LIMIT:
            raise WireError(f"a message of {length} bytes; the limit is {MESSAGE_LIMIT}")
        return self._read(exactly(self._socket, length), exactly(self._socket, MAC_BYTES))

    def _read(self, body: bytes, mac: bytes) -> Message:
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, body)):
            raise WireError("a message is not authentic: the other side does not know the job's token")
        self._received += 1
        try:
            message = json.loads(body)
        except ValueError as error:
            raise WireError(f"a message is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise WireError("a message is not a JSON object")
        return message

    def send_chunk(self, data: memoryview) -> None:
        """Send a piece of the payload."""
        self._send(_U32.pack(len(data)), socket.MSG_MORE)
        self._send(data)

    def send_chunk_from(self, send: Callable[[int, int, int], int], offset: int, length: int) -> None:
        """Send a piece of the payload without a copy in this process.

        Args:
            send: Called with an offset, a length and a socket's descriptor; sends at most this part of the payload
                and returns the number of bytes sent, 0: the bytes do not exist any more.
            offset: Offset of the piece, bytes.
            length: Length of the piece, bytes.

        Raises:
            ConnectionError: the bytes do not exist any more, so the other side gets only a part of the piece.
        """
        self._send(_U32.pack(length), socket.MSG_MORE)
        done = 0
        while done < length:
            try:
                count = send(offset + done, length - done, self._socket.fileno())
            except BlockingIOError as error:
                raise TimeoutError("the other side accepted no data in time") from error
            if count == 0:
                raise ConnectionError("the copy was overwritten while it was sent")
            done += count

    def give_up(self) -> None:
        """Notify the other side that no more of the payload follows."""
        self._send(_U32.pack(0))

    def receive_chunk(self, room: memoryview, ready: Callable[[int], object] | None = None) -> int:
        """Fill ``room`` with the next piece of the payload; returns its length in bytes, 0: the other side gave up.

        Args:
            room: Memory for the rest of the payload.
            ready: Called with the length of the piece, before ``room`` is written.
        """
        length = self._length()
        if length > min(len(room), CHUNK_LIMIT):
            raise WireError(f"a piece of {length} bytes, where {len(room)} are left of the payload")
        if ready is not None:
            ready(length)
        _fill(self._socket, room[:length])
        return length

    def set_patience(self, seconds: float) -> None:
        """Set the number of seconds without progress after which the other side counts as silent."""
        set_patience(self._socket, seconds)

    def cut(self) -> None:
        """Break the connection; a thread that waits on it gets an error."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the connection is closed already

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send(self, data: bytes | memoryview, flags: int = 0) -> None:
        try:
            self._socket.sendall(data, flags)
        except BlockingIOError as error:
            raise TimeoutError("the other side accepted no data in time") from error

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + _NUMBER.pack(number) + body, hashlib.sha256)

    def _length(self) -> int:
        return int.from_bytes(exactly(self._socket, _U32.size), "little")


class Greeting:
    """The server's side of a handshake: collects the client's bytes, in pieces, until the first message is complete.

    Args:
        random: Returns the requested number of random bytes.
    """

    def __init__(self, random: Callable[[int], bytes]) -> None:
        self.nonce = random(NONCE_BYTES)
        """The nonce that the server has sent to the client."""
        self._got = bytearray()

    def missing(self) -> int:
        """Return the number of bytes to read next; 0: the greeting is complete.

        Raises:
            WireError: the first message is too long.
        """
        if not self._got:
            return 1
        begin = self._begin()
        if len(self._got) < begin:
            return begin - len(self._got)
        length = self._length()
        if length > MESSAGE_LIMIT:
            raise WireError(f"a message of {length} bytes; the limit is {MESSAGE_LIMIT}")
        return begin + length + MAC_BYTES - len(self._got)

    def add(self, data: bytes) -> None:
        """Add received bytes.

        Raises:
            ConnectionError: ``data`` is empty: the other side closed the connection.
        """
        if not data:
            raise ConnectionError("the other side closed the connection")
        self._got += data

    @property
    def job(self) -> str:
        """Return the job that the client names."""
        return self._got[1 : 1 + self._got[0]].decode(errors="replace")

    @property
    def client_nonce(self) -> bytes:
        """Return the client's nonce."""
        begin = 1 + self._got[0]
        return bytes(self._got[begin : begin + NONCE_BYTES])

    def proven(self, connection: socket.socket, key: bytes) -> tuple[Wire, Message]:
        """Verify the first message with the key; returns the connection after its handshake, and the message.

        Raises:
            WireError: the message is not authentic, or no JSON object.
        """
        prepare(connection, SILENT_S)
        wire, begin = Wire(connection, key, client=False), self._begin()
        return wire, wire._read(bytes(self._got[begin:-MAC_BYTES]), bytes(self._got[-MAC_BYTES:]))

    def _begin(self) -> int:
        """Return the offset at which the body of the first message begins."""
        return 1 + self._got[0] + NONCE_BYTES + _U32.size

    def _length(self) -> int:
        begin = self._begin()
        return int.from_bytes(self._got[begin - _U32.size : begin], "little")


def exactly(connection: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes; raises ConnectionError or TimeoutError."""
    found = bytearray(count)
    _fill(connection, memoryview(found))
    return bytes(found)


def _fill(connection: socket.socket, room: memoryview) -> None:
    done = 0
    while done < len(room):
        try:
            got = connection.recv_into(room[done:], 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("no data arrived in time") from error
        if got == 0:
            raise ConnectionError("the other side closed the connection")
        done += got


def set_patience(connection: socket.socket, seconds: float) -> None:
    """Set a time-out in the kernel: Python's own time-outs cost a poll for each call and rule out MSG_WAITALL."""
    connection.settimeout(None)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def prepare(connection: socket.socket, patience_s: float) -> None:
    """Set the options of a new connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_patience(connection, patience_s)


def session_key(token: bytes, job: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the key of a connection."""
    return hmac.digest(token, MAGIC + server_nonce + client_nonce + job.encode(), hashlib.sha256)


def connect(
    address: Address,
    job: str,
    token: bytes,
    *,
    card: Card | None = None,
    connect_s: float = SILENT_S,
    patience_s: float = SILENT_S,
) -> Wire:
    """Connect to a data port as a client.

    Args:
        address: Address of the data port.
        job: Name of the job.
        token: The job's token at the other agent.
        card: Network card of this machine to send from; None: the kernel chooses it.
        connect_s: Time limit for the connection, seconds.
        patience_s: After this time without progress, the other side counts as silent, seconds.

    Raises:
        WireError: the address has no data port with this protocol.
        OSError: the connection failed, or the port did not answer in time.
    """
    connection = _connected(address, card or Card(), connect_s)
    try:
        prepare(connection, patience_s)
        greeting = exactly(connection, len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise WireError(f"{address} is not a data port of everstep")
        nonce, name = os.urandom(NONCE_BYTES), job.encode()
        connection.sendall(bytes([len(name)]) + name + nonce)
        return Wire(connection, session_key(token, job, greeting[len(MAGIC) :], nonce), client=True)
    except BaseException:
        connection.close()
        raise


def _connected(address: Address, card: Card, timeout_s: float) -> socket.socket:
    """Connect from a card. Without the device, the kernel may send from any card of the same network."""
    family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(timeout_s)
        if card.host:
            if not card.loopback and card.name:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, card.name.encode())
            connection.bind((card.host, 0))
        connection.connect(target)
    except OSError as error:
        connection.close()
        sent_from = f" from {card.name} ({card.host})" if card.host else ""
        reason = f"{address} is not reached{sent_from}: {error.strerror or error}"
        raise OSError(error.errno or errno.ETIMEDOUT, reason) from error
    return connection
