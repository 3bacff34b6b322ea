"""Loopback addresses for tests that run at the same time."""

from __future__ import annotations

import os
import socket

import pytest


def own_host(last: int) -> str:
    """Return an address that no other process of this test run uses, so that a free port on it stays free.

    Args:
        last: The last number of the address. Each kind of server in the tests has its own number.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return f"127.0.{1 + int(number)}.{last}"


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this computer has no IPv6 loopback address ::1")
