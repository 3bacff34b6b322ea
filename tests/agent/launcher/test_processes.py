"""The kernel reuses process ids. So a process with a recorded id may be another process than the recorded one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.launcher.processes import Reaper, Watch, kill_family
from everstep.system.procfs import start_ticks

NEXT = Path("/proc/sys/kernel/ns_last_pid")
TRIES = 300


@contextmanager
def sleeping(*, session: bool = False) -> Iterator[int]:
    """Run a process that only sleeps, and yield its id."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=session)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def started_as(pid: int) -> subprocess.Popen[bytes] | None:
    """Start a process with a given id. Returns None if another process took the id first."""
    try:
        NEXT.write_text(str(pid - 1))
    except PermissionError:
        pytest.skip("only root may choose the next pid")
    found = subprocess.Popen(["sleep", "600"], start_new_session=True)
    if found.pid == pid:
        return found
    found.kill()
    found.wait()
    return None


async def told(watch: Callable[[Callable[[], None]], Watch]) -> bool:
    """Return whether the end of a process is reported within 5 s."""
    ended = asyncio.Event()
    watching = watch(ended.set)
    try:
        async with asyncio.timeout(5):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        watching.close()
    return True


async def test_an_end_is_reported_even_if_it_came_before_the_watch() -> None:
    with sleeping() as pid:
        ticks = start_ticks(pid)
        asyncio.get_running_loop().call_later(0.2, os.kill, pid, signal.SIGKILL)
        assert await told(lambda ended: Watch(pid, ticks, ended))
    assert await told(lambda ended: Watch(pid, ticks, ended))


async def test_the_end_of_a_process_is_reported_although_another_process_has_its_id() -> None:
    with sleeping() as pid:
        ticks = start_ticks(pid)
        assert await told(lambda ended: Watch(pid, ticks - 100, ended))


def test_a_process_id_that_the_kernel_reused() -> None:
    with sleeping() as first:
        ticks = start_ticks(first)
    time.sleep(0.05)  # start times are in hundredths of a second
    stranger = next(filter(None, (started_as(first) for _ in range(TRIES))), None)
    assert stranger, f"no new process got pid {first} in {TRIES} attempts"
    try:
        assert start_ticks(first) not in (0, ticks)
        assert asyncio.run(told(lambda ended: Watch(first, ticks, ended)))
        kill_family(first, ticks)
        assert stranger.poll() is None, "the new process with the old id is killed"
    finally:
        stranger.kill()
        stranger.wait()


def test_children_of_a_rank_are_killed_although_another_process_has_its_id() -> None:
    mark = f"EVERSTEP_REPORT_FILE=/dev/shm/of-{os.getpid()}"
    name, _, value = mark.partition("=")
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, name: value}, start_new_session=True)
    with sleeping(session=True) as stranger:
        kill_family(stranger, start_ticks(stranger) - 1, mark)
        assert child.wait(20) == -signal.SIGKILL
        assert Path(f"/proc/{stranger}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_end_of_an_earlier_process_with_the_same_id_is_forgotten() -> None:
    reaper = Reaper()
    with sleeping() as pid:
        os.kill(pid, signal.SIGKILL)
        while pid not in reaper._ends:
            reaper.reap()
            time.sleep(0.01)
    reaper.forget(pid)
    assert asyncio.run(reaper.end_of(pid, start_ticks(pid))).kind == "unknown"
