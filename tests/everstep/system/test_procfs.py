"""Processes as /proc shows them, with any names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agent.launcher.processes import family_of
from controlplane.local import cluster_processes
from everstep.system.procfs import (
    boot_id,
    is_alive,
    living,
    pids,
    process_of,
    processes,
    start_ticks,
    threads_of,
)

NAMES = [b"plain", b"a (b) c) d", b") R 1 1 1", b"cut \xc3", b"\xff\xfe", b"two\nlines"]
SLEEP = """
import sys, time
from pathlib import Path
Path("/proc/self/comm").write_bytes(bytes.fromhex(sys.argv[1]))
print(flush=True)
time.sleep(1000)
"""


@pytest.fixture(params=NAMES, ids=repr)
def named(request: pytest.FixtureRequest) -> Iterator[tuple[int, bytes]]:
    """A process in its own session. Its name may have any bytes."""
    command = [sys.executable, "-c", SLEEP, request.param.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid, request.param
        process.kill()


def test_a_process_of_any_name_is_read_by_all_who_look_at_processes(named: tuple[int, bytes]) -> None:
    pid, name = named
    found = process_of(pid)

    assert found is not None
    assert (found.pid, os.fsencode(found.name), found.parent, found.session) == (pid, name, os.getpid(), pid)
    assert found.lives and is_alive(pid, found.start)
    assert (pid, found.start) in [(process.pid, process.start) for process in living()]
    assert start_ticks(pid) == found.start
    assert family_of(pid) == [pid]
    assert (pid, os.getpid(), pid) in [(process.pid, process.parent, process.session) for process in processes()]
    assert cluster_processes.identify(pid) == cluster_processes.Process(pid, found.start)
    assert cluster_processes.of_cluster("none") == set()


def test_a_process_that_is_gone_and_a_zombie() -> None:
    process = subprocess.Popen(["true"])
    while (found := process_of(process.pid)) is not None and found.lives:
        time.sleep(0.01)
    assert found is not None and found.state == "Z"
    assert not is_alive(process.pid, found.start)
    process.wait()
    assert process_of(process.pid) is None
    assert process.pid not in pids()


def test_a_process_whose_first_thread_ended_lives_as_long_as_another_one() -> None:
    """The other thread keeps the process's memory, as in a killed process that has not ended yet."""
    ends = "import ctypes, threading; threading.Thread(target=input).start(); ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen([sys.executable, "-c", ends], stdin=subprocess.PIPE) as process:
        while (found := process_of(process.pid)) is not None and found.state != "Z":
            time.sleep(0.01)
        assert found is not None and found.lives and is_alive(process.pid, found.start)
        assert process.stdin
        process.stdin.close()


def test_threads_are_read_like_processes() -> None:
    threads = threads_of(os.getpid())

    assert threads and all(thread.session == os.getsid(0) for thread in threads)
    assert len(boot_id()) == 36
