"""A client that connects to the data port without a token takes no place away from clients with a token."""

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
    with socket.create_connection((HOST, peer.address.port), source_address=(address, 0)) as found:
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


def test_hundreds_of_idle_connections_do_not_block_clients_with_a_token() -> None:
    threads = threading.active_count()
    with side() as peer, contextlib.ExitStack() as stack:
        for number in range(400):
            stack.enter_context(idle(peer, HOST))  # clients with a token come from this address too
            if number % 40 == 0:
                assert asks(peer)
        assert threading.active_count() < threads + 20, "a connection without a token has no thread"


def test_the_oldest_connection_of_an_address_is_closed_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MOST_FROM_ONE", 3)
    monkeypatch.setattr(handshake, "GREET_S", 3600.0)
    with side() as peer, contextlib.ExitStack() as stack:
        other = stack.enter_context(idle(peer, "127.0.0.3"))
        same = [stack.enter_context(idle(peer)) for _ in range(5)]

        assert [is_open(one) for one in same] == [False, False, True, True, True]
        assert is_open(other)
        assert asks(peer)


def test_with_too_many_connections_the_address_with_the_most_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MOST_UNPROVEN", 4)
    monkeypatch.setattr(handshake, "GREET_S", 3600.0)
    with side() as peer, contextlib.ExitStack() as stack:
        one = stack.enter_context(idle(peer, "127.0.0.3"))
        many = [stack.enter_context(idle(peer)) for _ in range(3)]
        another = stack.enter_context(idle(peer, "127.0.0.4"))

        assert [is_open(connection) for connection in many] == [False, True, True]
        assert is_open(one)
        assert is_open(another)


def test_only_a_client_without_a_token_is_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GREET_S", 0.5)
    with side() as peer, idle(peer) as waiting, contextlib.closing(peer.connect()) as wire:
        wire.send(Request(file="own", rank=0, step=1).model_dump())
        wire.receive()
        waiting.settimeout(30)
        assert waiting.recv(1) == b""
        wire.send(Request(file="own", rank=0, step=1).model_dump())
        assert "gone" in wire.receive(), "a client that has shown a token is not timed out"


def test_a_wrong_token_or_a_too_long_message_closes_the_connection_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "GREET_S", 3600.0)
    with side() as peer:
        wire = connect(peer.address, JOB, b"x" * 32)
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


def test_a_closing_port_closes_idle_connections() -> None:
    with side() as peer, idle(peer) as waiting:
        peer.port.close()
        waiting.settimeout(30)
        assert waiting.recv(1) == b""
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((HOST, peer.address.port))


def test_all_addresses_of_a_machine_count_as_one() -> None:
    assert origin("10.0.0.1") == "10.0.0.1"
    assert origin("::ffff:10.0.0.1") == "10.0.0.1"
    assert origin("2001:db8::1") == origin("2001:db8::ffff:1") != origin("2001:db8:0:1::1")
    assert origin("fe80::1%eth0") == origin("fe80::2")
