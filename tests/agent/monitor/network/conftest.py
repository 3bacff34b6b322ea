"""A new network namespace for each test. It has nothing of this computer's network."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
MISSING = "" if os.geteuid() == 0 and shutil.which("ip") else "network namespaces need root and iproute2"

Ip = Callable[[str], None]


@pytest.fixture
def ip() -> Iterator[Ip]:
    """Move this thread, and threads that it starts, into a new network namespace. Yields the command ``ip`` for it."""
    if MISSING:
        pytest.skip(MISSING)
    libc = ctypes.CDLL(None, use_errno=True)

    def run(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    with Path("/proc/thread-self/ns/net").open("rb") as before:
        assert libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            run("link set lo up")
            run("link add eth0 type veth peer name far0")
            run("address add 10.98.0.1/24 dev eth0")
            run("link set eth0 up")
            run("link set far0 up")
            yield run
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
