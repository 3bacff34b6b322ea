"""Addresses and ranges of ports are read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.addresses import Address, Ports, is_loopback, parse_address, parse_address_with_ports

HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.ip_addresses(v=6).map(lambda address: f"{address}%eth0"),
    st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{1,5})?", fullmatch=True),
)
PORTS = st.integers(0, 65535)


@given(HOSTS, PORTS)
def test_what_is_written_is_read_again(host: str, port: int) -> None:
    assert parse_address(str(Address(host, port))) == Address(host, port)


@given(HOSTS, st.tuples(st.integers(1, 65535), st.integers(1, 65535)).map(sorted))
def test_a_range_of_ports_is_read_after_a_host(host: str, ends: list[int]) -> None:
    ports = Ports(*ends)
    text = f"[{host}]:{ports}" if ":" in host else f"{host}:{ports}"
    assert parse_address_with_ports(text) == (host, ports)
    assert Ports.parse(str(ports)) == ports
    assert (len(ports), next(iter(ports))) == (ends[1] - ends[0] + 1, ends[0])


@given(st.text(alphabet="[]:.-0123456789abc% ", max_size=30))
def test_any_text_is_an_address_or_an_error_that_names_it(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError as error:
        assert repr(text) in str(error) or repr(text.rpartition(":")[2]) in str(error)
    else:
        assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("::1:7070", r"without brackets; write it as in \[fd00::17\]:7070"),
        ("[10.0.4.17]:7070", "is not host:port"),
        ("[::1]", "is not host:port"),
        ("gpu-0417", "is not host:port"),
        (":7070", "is not host:port"),
        ("gpu-0417:", "not a port or a range of ports"),
        ("gpu-0417:70000", "not a port or a range of ports up to 65535"),
        ("gpu-0417:7010-7000", "the lower one first"),
        ("gpu-0417:7000-7010", "has a range of ports; give one port"),
        ("http://gpu-0417:7070", "is not host:port"),
        ("gpu 0417:7070", "is not host:port"),
    ],
)
def test_what_is_wrong_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.11", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.4.17", False),
        ("fd00::17", False),
        ("m1", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
