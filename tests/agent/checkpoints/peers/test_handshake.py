"""A client that connects to the data port without a token takes no place from clients with a token."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from agent.checkpoints.peers import handshake
from agent.checkpoints.peers.copy_requests import Request
from agent.checkpoints.peers.handshake import origin
from agent.checkpoints.peers.wire import MAGIC, NONCE_BYTES, connect
from everstep.errors import WireError
from tests.agent.checkpoints.peers.sides import HOST, JOB, Side, side


@contextlib.contextmanager
def idle(peer: Side, address: str = "127.0.0.2") -> Iterator[socket.socket]:
    """Open a connection from an address, read the greeting, and send nothing."""
    with socket.create_connection((HOST, peer.port.port), source_address=(address, 0)) as found:
        found.settimeout(30)
        assert found.recv(8, socket.MSG_WAITALL) == MAGIC
        assert len(found.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
        yield found


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.3)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def asks(peer: Side) -> bool:
    """Return whether a client with a token gets an answer."""
    with contextlib.closing(peer.connect()) as wire:
        wire.send(Request(file="own", rank=0, step=1).model_dump())
        return "gone" in wire.receive()


def test_hundreds_of_idle_connections_from_one_address_keep_nobody_out() -> None:
    threads = threading.active_count()
    with side() as peer, contextlib.ExitStack() as stack:
        for number in range(400):
            stack.enter_context(idle(peer, HOST))  # the address of the clients with a token
            if number % 40 == 0:
                assert asks(peer)
        assert threading.active_count() < threads + 20, "a connection without a token has no thread"


def test_the_oldest_of_an_address_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MOST_FROM_ONE", 3)
    monkeypatch.setattr(handshake, "GREET_S", 3600.0)
    with side() as peer, contextlib.ExitStack() as stack:
        other = stack.enter_context(idle(peer, "127.0.0.3"))
        same = [stack.enter_context(idle(peer)) for _ in range(5)]

        assert [is_open(one) for one in same] == [False, False, True, True, True]
        assert is_open(other)
        assert asks(peer)


def test_the_address_that_has_most_makes_room_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MOST_UNPROVEN", 4)
    monkeypatch.setattr(handshake, "GREET_S", 3600.0)
    with side() as peer, contextlib.ExitStack() as stack:
        one = stack.enter_context(idle(peer, "127.0.0.3"))
        many = [stack.enter_context(idle(peer)) for _ in range(3)]
        another = stack.enter_context(idle(peer, "127.0.0.4"))

        assert [is_open(connection) for connection in many] == [False, True, True]
        assert is_open(one)
        assert is_open(another)


def test_who_proves_nothing_in_time_is_turned_away_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GREET_S", 0.5)
    with side() as peer, idle(peer) as waiting, contextlib.closing(peer.connect()) as wire:
        wire.send(Request(file="own", rank=0, step=1).model_dump())
        wire.receive()
        waiting.settimeout(30)
        assert waiting.recv(1) == b""
        wire.send(Request(file="own", rank=0, step=1).model_dump())
        assert "gone" in wire.receive(), "a client that has shown a token is not timed out"


def test_a_wrong_token_and_a_long_message_are_turned_away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GREET_S", 3600.0)
    with side() as peer:
        wire = connect(HOST, peer.port.port, JOB, b"x" * 32)
        with contextlib.closing(wire):
            wire.send({"op": "get"})
            with pytest.raises((OSError, WireError)):
                wire.receive()
        with idle(peer) as rude:
            rude.sendall(b"\x03gpt" + b"n" * NONCE_BYTES + b"\xff\xff\xff\xff")
            rude.settimeout(30)
            assert rude.recv(1) == b""
        assert asks(peer)


def test_a_greeting_may_come_byte_by_byte() -> None:
    with side() as peer, contextlib.closing(peer.connect()) as wire:
        send, wire._send = wire._send, lambda data: [send(bytes([one])) for one in bytes(data)]  # type: ignore
        wire.send(Request(file="own", rank=0, step=1).model_dump())
        assert "gone" in wire.receive()


def test_the_port_that_closes_turns_away_who_waits() -> None:
    with side() as peer, idle(peer) as waiting:
        peer.port.close()
        waiting.settimeout(30)
        assert waiting.recv(1) == b""
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((HOST, peer.port.port))


def test_one_machine_is_one_address_however_many_it_takes() -> None:
    assert origin("10.0.0.1") == "10.0.0.1"
    assert origin("::ffff:10.0.0.1") == "10.0.0.1"
    assert origin("2001:db8::1") == origin("2001:db8::ffff:1") != origin("2001:db8:0:1::1")
    assert origin("fe80::1%eth0") == origin("fe80::2")
