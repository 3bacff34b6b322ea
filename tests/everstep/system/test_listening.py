"""A program listens on the first free port of a range."""

from __future__ import annotations

import contextlib
import socket

import pytest

from everstep.base.addresses import Ports
from everstep.system.listening import address_of, bound, listen
from tests.hosts import IPV6, own_host

HOST = own_host(41)
HOSTS = [HOST, pytest.param("::1", marks=IPV6)]


@pytest.mark.parametrize("host", HOSTS, ids=["ipv4", "ipv6"])
def test_the_first_free_port_is_taken_and_can_be_reached(host: str) -> None:
    with contextlib.ExitStack() as opened:
        first = address_of(opened.enter_context(listen(host))).port
        listener = opened.enter_context(listen(host, Ports(first, first + 50)))
        address = address_of(listener)
        assert address.host == host
        assert first < address.port <= first + 50
        opened.enter_context(socket.create_connection(address, timeout=10))


def test_a_range_without_a_free_port_is_named_with_what_to_do() -> None:
    with contextlib.ExitStack() as opened:
        first = address_of(opened.enter_context(listen(HOST))).port
        with pytest.raises(OSError, match=rf"port {first} of {HOST} is taken: .*'ss -ltnp'.* give another port"):
            listen(HOST, Ports(first, first))
        last = first
        while last < first + 3:
            last += 1
            with contextlib.suppress(OSError):
                opened.enter_context(listen(HOST, Ports(last, last)))
        with pytest.raises(OSError, match=rf"all ports {first}-{last} of {HOST} are taken: .* give a larger range"):
            listen(HOST, Ports(first, last))


def test_a_port_that_was_just_closed_is_free() -> None:
    with listen(HOST) as listener:
        port = address_of(listener).port
        with socket.create_connection((HOST, port)) as client:
            served, _ = listener.accept()
            served.close()  # this side keeps the closed connection for a minute
            client.recv(1)
    with listen(HOST, Ports(port, port)) as again:
        assert address_of(again).port == port


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.77 cannot be used: Cannot assign"):
        listen("192.0.2.77")
    with pytest.raises(OSError, match="Cannot assign"):
        bound("192.0.2.77", 0)
