"""A rank checks that it reaches the rendezvous store before its script waits for the store."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from agent.launcher.rank_process import reach_store
from everstep.decisions.blame.classify.rules import LOG_RULES

LIMIT_S = 0.6


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """The listening socket of a store."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as found:
        yield found


def environment(listener: socket.socket, world_size: int = 2) -> dict[str, str]:
    host, port = listener.getsockname()
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}


def test_a_store_that_answers_is_reached(listener: socket.socket) -> None:
    reach_store(environment(listener), LIMIT_S)


def test_a_store_to_which_nothing_gets_through_ends_the_rank(listener: socket.socket) -> None:
    """The queue of connections is full, so the kernel answers no further connection, as if packets were lost."""
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(listener.getsockname())
    with pytest.raises(ConnectionError, match=r"TCPStore at 127\.0\.0\.1:\d+, .* Connection timed out") as raised:
        reach_store(environment(listener), LIMIT_S)
    for one in waiting:
        one.close()
    line = f"ConnectionError: {raised.value}"
    assert next(rule for rule in LOG_RULES if rule.is_in(line)).name == "peer-unreachable"


def test_a_store_that_is_gone_is_left_to_torch() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        env = environment(gone)
    reach_store(env, LIMIT_S)


def test_a_rank_alone_needs_no_store(listener: socket.socket) -> None:
    with listener:
        env = environment(listener, world_size=1)
    reach_store(env | {"MASTER_ADDR": "192.0.2.1"}, LIMIT_S)
    reach_store({}, LIMIT_S)


def test_the_first_rank_of_a_machine_looks_for_all(listener: socket.socket) -> None:
    """Only this rank checks, since a store has enough other work."""
    listener.settimeout(LIMIT_S)
    reach_store(environment(listener) | {"LOCAL_RANK": "1"}, LIMIT_S)
    with pytest.raises(TimeoutError):
        listener.accept()
    reach_store(environment(listener) | {"LOCAL_RANK": "0"}, LIMIT_S)
    listener.accept()[0].close()


@pytest.mark.parametrize(
    ("number", "ends"), [(errno.EHOSTUNREACH, True), (errno.EINVAL, True), (errno.ECONNREFUSED, False)]
)
def test_a_rank_ends_for_a_network_that_does_not_work_and_for_nothing_else(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, number: int, ends: bool
) -> None:
    """For a route that drops all packets, the kernel reports an invalid argument."""

    def fails(*_: object) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_connection", fails)
    with pytest.raises(ConnectionError, match=os.strerror(number)) if ends else nullcontext():
        reach_store(environment(listener), LIMIT_S)
