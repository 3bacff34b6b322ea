"""Chooses addresses of local clusters: each address is free when it is chosen, and belongs to one cluster."""

from __future__ import annotations

import ipaddress
import random
import socket
from types import TracebackType
from typing import Literal, Self

from everstep.base.addresses import Address, Ports
from everstep.errors import ClusterError
from everstep.system.listening import bound, taken

DEFAULT = Ports(20_000, 31_999)
"""Range of ports. It is below the kernel's range for outgoing connections, because an outgoing connection could block a
port during a restart."""
TRIED = 200
"""The most ports of a range that are tried."""

Stage = Literal["chosen", "owned"]
"""Who claims an address. ``chosen``: the command ``up``, until the process of the address listens; ``owned``: the
supervisor of a cluster."""


def is_free(host: str, port: int) -> bool:
    """Whether a process could listen on this port now."""
    try:
        bound(host, port).close()
    except OSError:
        return False
    return True


class Claims:
    """Addresses that no other cluster of this computer may choose; a context manager that releases them.

    An address may belong to a cluster although no process listens there: before its process has started, or during a
    restart. So each claim binds a name in the abstract namespace of unix sockets, which the kernel frees when this
    process ends.

    Args:
        stage: Stage of the claims.
    """

    def __init__(self, stage: Stage = "chosen") -> None:
        self._stage: Stage = stage
        self._held: dict[tuple[str, int], socket.socket] = {}

    def claim(self, host: str, port: int) -> bool:
        """Claim an address; False: another cluster has it. If this object has the address already, the result is
        True."""
        if (host, port) in self._held:
            return True
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(_name(self._stage, host, port))
        except OSError:
            name.close()
            return False
        if self._stage == "chosen" and _is_owned(host, port):
            name.close()
            return False
        self._held[host, port] = name
        return True

    def choose(self, host: str, within: Ports = DEFAULT, *, preferred: int = 0) -> Address:
        """Claim a free port of a host: the preferred one, if it is free, or else one of a range.

        Raises:
            ClusterError: the ports are taken, or the host is not an address of this computer.
        """
        candidates = random.sample(range(within.first, within.last + 1), min(len(within), TRIED))
        for port in [preferred, *candidates] if preferred else candidates:
            if is_free(host, port) and self.claim(host, port):
                return Address(host, port)
        raise ClusterError(f"no port is free on {host}: {taken(host, within)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._held.values():
            name.close()
        self._held.clear()


def machine_host(base: str, index: int) -> str:
    """The loopback address of a machine: ``base`` + index."""
    return str(ipaddress.ip_address(base) + index)


def _is_owned(host: str, port: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_name("owned", host, port))
        except OSError:
            return False
    return True


def _name(stage: Stage, host: str, port: int) -> str:
    return f"\0everstep-{stage}-{Address(host, port)}"
