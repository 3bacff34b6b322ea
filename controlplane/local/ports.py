"""Chooses addresses of local clusters: each address is free when it is chosen, and belongs to one cluster."""

from __future__ import annotations

import ipaddress
import random
import socket
from types import TracebackType
from typing import Literal, Self

FIRST, LAST = 20_000, 32_000
"""Range of ports. It is below the kernel's range for outgoing connections, because an outgoing connection could block a
port during a restart."""

Stage = Literal["chosen", "owned"]
"""Who claims an address. ``chosen``: the command ``up``, until the process of the address listens; ``owned``: the
supervisor of a cluster."""


def is_free(host: str, port: int) -> bool:
    """Whether a process could listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections that just ended
        try:
            probe.bind((host, port))
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

    def choose(self, host: str, preferred: int = 0) -> int:
        """Claim a free port of a host: the preferred one, if it is free.

        Raises:
            OSError: the host has no free port, or is not an address of this computer.
        """
        candidates = random.sample(range(FIRST, LAST), 200)
        for port in [preferred, *candidates] if preferred else candidates:
            if is_free(host, port) and self.claim(host, port):
                return port
        raise OSError(f"no port is free on {host}")

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
    return str(ipaddress.IPv4Address(base) + index)


def split(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def _is_owned(host: str, port: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_name("owned", host, port))
        except OSError:
            return False
    return True


def _name(stage: Stage, host: str, port: int) -> str:
    return f"\0everstep-{stage}-{host}:{port}"
