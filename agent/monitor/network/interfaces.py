"""This module chooses the network interfaces that are inspected, and reads their speeds."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase

from pydantic import Field

from agent.monitor.inspection import Limits
from agent.monitor.network import netlink
from agent.monitor.network.netlink import Link
from everstep.system.procfs import network_namespace


class NetworkLimits(Limits):
    """Which interfaces are inspected, and how often."""

    interval_s: float = Field(default=30.0, gt=0)
    """Period, seconds (ByteRobust, table 3)."""
    interfaces: list[str] = Field(default_factory=list)
    """Names or patterns (``eth*``) of the interfaces to inspect; all of them count as used by jobs. If the list is
    empty, hardware interfaces that were up at some inspection, and the interface with the agent's address, are
    inspected. Then a job uses the agent's interface, and interfaces that its variables name (``NCCL_SOCKET_IFNAME``,
    ``GLOO_SOCKET_IFNAME``, ``NCCL_IB_HCA``)."""
    ignore: list[str] = Field(default_factory=list)
    """Names or patterns of interfaces that are not inspected, e.g. one for management only."""


def looked_at(host: str, known: Collection[str], limits: NetworkLimits) -> tuple[dict[str, Link], set[str]]:
    """Return the interfaces to inspect, and the names of all interfaces.

    Args:
        host: Address that the agent listens on.
        known: Names of interfaces that were inspected before.
        limits: Settings of the site.

    Raises:
        CannotInspect: the kernel does not answer.
    """
    links = netlink.links()
    address = address_of(host)
    with_address = netlink.addresses().get(address) if address else None
    return chosen(links.values(), known, with_address, limits), set(links)


def own_name(host: str) -> str:
    """Return the name of the interface that has the agent's address; empty: no interface has it.

    Raises:
        CannotInspect: the kernel does not answer.
    """
    index = netlink.addresses().get(address_of(host))
    return next((link.name for link in netlink.links().values() if link.index == index), "")


def chosen(
    links: Iterable[Link], known: Collection[str], with_address: int | None, limits: NetworkLimits
) -> dict[str, Link]:
    """Choose the interfaces to inspect.

    Args:
        links: All interfaces.
        known: Names of interfaces that were inspected before; they stay.
        with_address: Index of the interface that has the agent's address; None: no interface has it.
        limits: Settings of the site.
    """
    found = {}
    for each in links:
        link = replace(each, own=each.index == with_address)
        of_machine = link.carrier and not link.loopback and (not link.kind or link.own)
        wanted = bool(limits.interfaces) or link.name in known or of_machine
        if wanted and may_be_looked_at(link.name, limits):
            found[link.name] = link
    return found


def may_be_looked_at(name: str, limits: NetworkLimits) -> bool:
    """Return whether a site wants an interface of this name inspected."""
    return (not limits.interfaces or _is_one_of(name, limits.interfaces)) and not _is_one_of(name, limits.ignore)


def never_seen(names: Collection[str], limits: NetworkLimits) -> list[str]:
    """Return the names of interfaces that are in the settings and never existed. A pattern may match no interface."""
    return [name for name in limits.interfaces if name not in names and not set(name) & set("*?[")]


def address_of(host: str) -> str:
    """Return the address of a host name; empty: it has no address, or it means all interfaces (``0.0.0.0``)."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return "" if address.is_unspecified else str(address)
    with suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def namespace() -> int:
    """Return the id of this thread's network namespace, which the inspected interfaces and counters belong to.

    Raises:
        OSError: it cannot be read.
    """
    return network_namespace().stat().st_ino


def speeds() -> dict[str, int]:
    """Return the speed of each interface in Mbit/s, if its driver reports it."""
    import psutil  # here, because the import is slow and this is the thread of the inspection

    return {name: stats.speed for name, stats in psutil.net_if_stats().items() if stats.speed > 0}


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
