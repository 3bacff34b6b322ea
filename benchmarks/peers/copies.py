"""Plain copies of bytes in shared memory, by memcpy and over a bare socket: the limit for any transfer of slots."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from pathlib import Path
from typing import Self

PIECE = 4 << 20
"""Size of one send or receive, bytes. It was the fastest of the sizes from 64 KiB to 4 MiB that were measured."""


class Mapped:
    """A mapped file in shared memory whose pages all exist."""

    def __init__(self, path: Path, size: int) -> None:
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self._map = mmap.mmap(file.fileno(), size)
        self.size = size
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(self.address, 7, size)


def memcpy(source: Mapped, target: Mapped) -> None:
    """Copy all bytes in this process."""
    ctypes.memmove(target.address, source.address, source.size)


class Sender:
    """A TCP connection to ``receive``; a context manager."""

    def __init__(self, port: int, source: Mapped) -> None:
        self._source = source
        self._connection = socket.create_connection(("127.0.0.1", port))
        _prepare(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self) -> None:
        """Send all bytes, and wait until they have arrived.

        Raises:
            ConnectionError: the receiver ended.
        """
        for at in range(0, self._source.size, PIECE):
            self._connection.sendall(self._source.view[at : at + PIECE])
        if self._connection.recv(1) != b".":
            raise ConnectionError("the receiver ended")


def receive(listener: socket.socket, target: Mapped, count: int) -> None:
    """Receive all bytes of a ``Sender``, ``count`` times, directly into the mapped file and without verification."""
    connection, _ = listener.accept()
    with connection:
        _prepare(connection)
        for _ in range(count):
            done = 0
            while done < target.size:
                received = connection.recv_into(target.view[done : done + PIECE], 0, socket.MSG_WAITALL)
                if not received:
                    raise ConnectionError("the sender ended")
                done += received
            connection.sendall(b".")


def _prepare(connection: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, PIECE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
