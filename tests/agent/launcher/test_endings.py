"""How a process ended, as /proc shows it after the end began and before the process is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent.launcher.processes import End, ending_of
from everstep.system.procfs import start_ticks


@contextmanager
def ended(code: str) -> Iterator[tuple[int, int]]:
    """Yield the pid and the start time of a process that has ended, but whose status was not collected yet."""
    process = subprocess.Popen([sys.executable, "-c", f"input(); import os; {code}"], stdin=subprocess.PIPE)
    ticks = start_ticks(process.pid)
    assert ending_of(process.pid, ticks) is None, "the process still runs"
    assert process.stdin
    process.stdin.write(b"\n")
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid, ticks
    process.wait()


@pytest.mark.parametrize(
    ("code", "kind", "value"),
    [("os.kill(os.getpid(), 9)", "signal", 9), ("os.abort()", "signal", 6), ("os._exit(3)", "code", 3)],
)
def test_signal_or_code_are_known_before_it_is_gone(code: str, kind: str, value: int) -> None:
    with ended(code) as (pid, ticks):
        found = ending_of(pid, ticks)
        assert isinstance(found, End)
        assert (found.kind, found.value) == (kind, value)
        assert ending_of(pid, ticks + 1) is None, "the start time differs, so this pid belonged to another process"
    assert ending_of(pid, ticks) is None, "the process is gone"


def test_one_that_ends_well_is_waited_for() -> None:
    """Code 0 is no failure, so there is no hurry to report the end."""
    with ended("os._exit(0)") as (pid, ticks):
        assert ending_of(pid, ticks) is None
