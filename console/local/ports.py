"""Addresses of a local cluster: free when first chosen, kept afterwards."""

from __future__ import annotations

import ipaddress
import random
import socket

FIRST, LAST = 20_000, 32_000
"""Below the kernel's range for outgoing connections, so that none takes a port while its owner restarts."""


def is_free(host: str, port: int) -> bool:
    """Whether one could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that just ended do not matter
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def choose(host: str, preferred: int = 0) -> int:
    """A free port of a host: the preferred one, if it is free.

    Raises:
        OSError: the host has none, or is no address of this computer.
    """
    if preferred and is_free(host, preferred):
        return preferred
    for port in random.sample(range(FIRST, LAST), 200):
        if is_free(host, port):
            return port
    raise OSError(f"no free port on {host}")


def machine_host(base: str, index: int) -> str:
    """The loopback address of a machine: ``base`` + index."""
    return str(ipaddress.IPv4Address(base) + index)
