"""The network interface that the ranks of a machine talk through."""

from __future__ import annotations

import ipaddress
import socket

LIBRARIES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What gloo and NCCL read. Without it gloo looks up the host's own name, and NCCL takes the first interface that it
finds: often one that other machines cannot reach."""


def interface_of(host: str) -> str:
    """Name of the interface that has an address; empty: none has, or it is not known."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    wanted = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}
    if any(address.is_loopback for address in wanted):
        return "lo"  # which has all of 127.0.0.0/8
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        of_internet = [address for address in addresses if address.family in {socket.AF_INET, socket.AF_INET6}]
        own = [address.address.partition("%")[0] for address in of_internet]
        if not wanted.isdisjoint(map(ipaddress.ip_address, own)):
            return name
    return ""


def socket_environment(host: str) -> dict[str, str]:
    """Variables for ranks, so that they meet where their agent listens; none where the interface is not known."""
    name = interface_of(host)
    return dict.fromkeys(LIBRARIES, name) if name else {}
