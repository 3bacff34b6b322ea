"""Loopback addresses for tests that run side by side."""

from __future__ import annotations

import os


def own_host(last: int) -> str:
    """An address that no other process of this test run uses, so that a port found free there stays free.

    Args:
        last: Its last number; each kind of server in the tests has one of its own.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return f"127.0.{1 + int(number)}.{last}"
