"""Bytes over TCP. Each block that differs from the sent block is counted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from agent.diagnoser.network.stream import BLOCK, Received, greet, receive, send
from everstep.errors import CannotInspect


def between(first: Callable[[socket.socket], None]) -> Received:
    one, two = socket.socketpair()
    with one, two:
        sending = threading.Thread(target=first, args=(one,))
        sending.start()
        try:
            return receive(two)
        finally:
            two.close()
            sending.join(20)


def test_blocks_are_counted_and_compared() -> None:
    found = between(lambda end: send(end, 60.0, 5 * BLOCK))

    assert (found.bytes, found.wrong) == (5 * BLOCK, 0)
    assert found.bytes_per_second > 0


def test_a_block_that_is_damaged_on_its_way_is_counted() -> None:
    class Damaging:
        """A socket that changes a byte of the second block."""

        def __init__(self, end: socket.socket) -> None:
            self.end, self.sent = end, 0

        def sendall(self, data: bytearray) -> None:
            self.sent += 1
            changed = bytearray(data)
            changed[500_000] ^= self.sent == 2
            self.end.sendall(changed)

    found = between(lambda end: send(Damaging(end), 60.0, 5 * BLOCK))  # type: ignore[arg-type]
    assert (found.bytes, found.wrong) == (5 * BLOCK, 1)


def test_an_end_that_goes_away_is_no_end_of_the_blocks() -> None:
    with pytest.raises(ConnectionError, match="after 0 blocks"):
        between(lambda end: end.close())


def test_whoever_does_not_know_the_secret_is_refused() -> None:
    one, two = socket.socketpair()
    with one, two:
        one.sendall(b"x" * 32)
        with pytest.raises(CannotInspect, match="another program"):
            greet(two, "secret", 0)
