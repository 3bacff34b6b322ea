"""Loopback addresses for tests that run at the same time."""

from __future__ import annotations

import os


def own_host(last: int) -> str:
    """Return an address that no other process of this test run uses, so that a free port on it stays free.

    Args:
        last: The last number of the address. Each kind of server in the tests has its own number.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return f"127.0.{1 + int(number)}.{last}"
