"""How a process ends that has begun to, as /proc has it before it is gone."""

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
    """A process that has ended, and of which nobody has taken the status: its pid, and when it started."""
    process = subprocess.Popen([sys.executable, "-c", f"input(); import os; {code}"], stdin=subprocess.PIPE)
    ticks = start_ticks(process.pid)
    assert ending_of(process.pid, ticks) is None, "it runs"
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
        assert ending_of(pid, ticks + 1) is None, "another process had this number"
    assert ending_of(pid, ticks) is None, "it is gone"


def test_one_that_ends_well_is_waited_for() -> None:
    """Code 0 is no failure; there is nothing to hurry for."""
    with ended("os._exit(0)") as (pid, ticks):
        assert ending_of(pid, ticks) is None
