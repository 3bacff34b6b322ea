"""The kernel's messages about links are parsed, and changes of links end a wait."""

from __future__ import annotations

import os
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.monitor.network import netlink
from everstep.errors import CannotInspect
from tests.agent.monitor.network.conftest import Ip


def attribute(kind: int, value: bytes) -> bytes:
    padding = b"\0" * (-len(value) % 4)
    return struct.pack("=HH", 4 + len(value), kind) + value + padding


def link(*attributes: bytes, flags: int = 0x10041) -> bytes:
    return struct.pack("=BxHiII", 0, 1, 7, flags, 0) + b"".join(attributes)


def test_a_message_about_a_link_is_parsed() -> None:
    info = attribute(1, b"veth\0")
    counters = struct.pack("=24Q", *range(24))
    body = link(
        attribute(3, b"eth0\0"), attribute(18, info), attribute(48, struct.pack("=I", 3)), attribute(23, counters)
    )

    found = netlink.link_of(body)

    assert (found.index, found.name, found.kind, found.downs) == (7, "eth0", "veth", 3)
    assert found.carrier and found.switched_on and not found.loopback
    assert found.statistics["tx_packets"] == 1 and found.statistics["tx_carrier_errors"] == 17


def test_changes_of_an_old_kernel_are_converted_to_outages() -> None:
    assert netlink.link_of(link(attribute(35, struct.pack("=I", 6)))).downs == 3


@pytest.mark.parametrize(("flags", "on", "carrier"), [(0x1, True, False), (0x10000, False, False)])
def test_a_carrier_needs_both_flags(flags: int, on: bool, carrier: bool) -> None:
    found = netlink.link_of(link(flags=flags))
    assert (found.switched_on, found.carrier) == (on, carrier)


@given(st.binary(max_size=80))
def test_damaged_messages_are_parsed_without_an_error(data: bytes) -> None:
    assert sum(len(body) for _, _, body in netlink.messages_of(data)) <= len(data)
    assert sum(len(value) for _, value in netlink.attributes_of(data)) <= len(data)


def test_links_and_addresses_are_those_of_the_threads_network_namespace(ip: Ip) -> None:
    found = netlink.links()

    assert {"lo", "eth0", "far0"} <= found.keys()
    assert found["eth0"].kind == "veth" and found["eth0"].carrier
    assert found["lo"].loopback
    assert netlink.addresses()["10.98.0.1"] == found["eth0"].index


def test_only_changes_of_the_requested_interfaces_end_a_wait(ip: Ip) -> None:
    index = netlink.links()["eth0"].index
    changes = netlink.LinkChanges()
    changes.open()

    ip("link add other0 type veth peer name other1")
    assert not changes.wait({index + 1000}, 0.05)
    ip("link set far0 down")
    assert changes.wait({index}, 60)
    changes.close()


def test_a_wait_returns_when_its_socket_is_closed() -> None:
    changes = netlink.LinkChanges()
    waiting = threading.Thread(target=changes.wait, args=(set(), 600))
    waiting.start()

    changes.close()

    waiting.join(60)
    assert not waiting.is_alive()


def test_a_wait_that_ends_during_a_close_causes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    changes, write = netlink.LinkChanges(), os.eventfd_write
    waiting = threading.Thread(target=changes.wait, args=(set(), 0.1))

    def late(file: int, value: int) -> None:
        waiting.join(1)
        write(file, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    waiting.start()
    changes.close()
    waiting.join(60)
    changes.hurry()
    assert not waiting.is_alive()


def test_a_refused_socket_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "NETLINK_ROUTE", 4095)

    with pytest.raises(CannotInspect, match="does not open a netlink socket"):
        netlink.links()


def test_a_refused_list_is_reported() -> None:
    with pytest.raises(CannotInspect, match="does not list the network interfaces"):
        netlink._listed(0x3F0, b"")


def test_a_list_that_always_changes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlink, "_answer", lambda opened: ([], False))

    with pytest.raises(CannotInspect, match="changed 3 times"):
        netlink.links()


def test_a_kernel_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlink, "ANSWER_S", 0.01)
    silent, other = socket.socketpair()
    with silent, other, pytest.raises(CannotInspect, match="did not list"):
        netlink._answer(silent)
