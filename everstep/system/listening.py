"""Opens sockets that accept TCP connections, on the first free port of a range."""

from __future__ import annotations

import errno
import socket

from everstep.base.addresses import ANY_PORT, Address, Ports

BACKLOG = 4096
"""The largest number of connections that wait to be accepted; the kernel may have a lower limit."""


def listen(host: str, ports: Ports = ANY_PORT, *, backlog: int = BACKLOG) -> socket.socket:
    """Open a socket that listens on the first free port.

    Args:
        host: A name or an address of this machine, IPv4 or IPv6, without brackets.
        ports: The ports to try, in order.
        backlog: The largest number of connections that wait to be accepted.

    Raises:
        OSError: no port is free, or the host is not of this machine; the message says which.
    """
    for port in ports:
        listener = None
        try:
            listener = bound(host, port)
            listener.listen(backlog)
        except OSError as error:
            if listener:
                listener.close()
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"{host} cannot be used: {error.strerror}") from error
            continue
        return listener
    raise OSError(errno.EADDRINUSE, taken(host, ports))


def bound(host: str, port: int) -> socket.socket:
    """Open a socket that has an address and does not listen yet; for ``host`` see ``listen``.

    Raises:
        OSError: the port is taken, or the host is not of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections that just ended
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened


def taken(host: str, ports: Ports) -> str:
    """Return the message about a host on which no port of a range is free, and what to do."""
    if ports.first == ports.last:
        which, remedy = f"port {ports} of {host} is taken", "give another port, or a range such as 7000-7010"
    else:
        which, remedy = f"all ports {ports} of {host} are taken", "give a larger range"
    return f"{which}: stop a program that uses one ('ss -ltnp' lists them), or {remedy}"


def address_of(listener: socket.socket) -> Address:
    """Return the address on which a socket listens."""
    host, port = listener.getsockname()[:2]
    return Address(str(host), int(port))
