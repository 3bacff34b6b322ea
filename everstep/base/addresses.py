"""Reads and writes addresses, ``host:port``, and ranges of ports.

In an address with a port, an IPv6 address is written in brackets: ``[fd00::17]:7070``. A host alone has no brackets.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

LAST_PORT = 65535


class Address(NamedTuple):
    """A host and a port; as text ``host:port``."""

    host: str
    """A name or an IP address, without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse ``host:port``, e.g. ``gpu-0417:7070``, ``10.0.4.17:7070`` or ``[fd00::17]:7070``.

    Raises:
        ValueError: the text is not an address; the message says what is wrong.
    """
    host, ports = parse_address_with_ports(text)
    if ports.first != ports.last:
        raise ValueError(f"{text!r} has a range of ports; give one port")
    return Address(host, ports.first)


def parse_address_with_ports(text: str) -> tuple[str, Ports]:
    """Parse ``host:port`` or ``host:first-last``.

    Raises:
        ValueError: the text is not an address; the message says what is wrong.
    """
    name, colon, ports = text.rpartition(":")
    if _is_ipv6(name):
        raise ValueError(f"{text!r} has an IPv6 address without brackets; write it as in [fd00::17]:7070")
    in_brackets = name.startswith("[") and name.endswith("]")
    host = name[1:-1] if in_brackets else name
    is_host = _is_ipv6(host) if in_brackets else bool(host) and not set(host) & set("[]/: ")
    if not colon or not is_host:
        raise ValueError(f"{text!r} is not host:port, e.g. 10.0.4.17:7070 or [fd00::17]:7070")
    return host, Ports.parse(ports)


@dataclass(frozen=True, slots=True)
class Ports:
    """A range of ports, of which a program takes the first free one. Port 0 alone: the kernel chooses a free port."""

    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> Ports:
        """Parse a port, ``7000``, or a range, ``7000-7010``.

        Raises:
            ValueError: the text is neither; the message says what is wrong.
        """
        first, dash, last = text.partition("-")
        last = last if dash else first
        if not (_is_port(first) and _is_port(last)):
            raise ValueError(f"{text!r} is not a port or a range of ports up to {LAST_PORT}, e.g. 7000 or 7000-7010")
        found = cls(int(first), int(last))
        if found.first > found.last or (dash and not found.first):
            raise ValueError(f"{text!r} is not a range of ports: write the lower one first, as in 7000-7010")
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


ANY_PORT = Ports()


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= LAST_PORT


def _is_ipv6(host: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        return False
