"""This module reads the stacks of one process with py-spy, within a deadline, and never leaves the process stopped.

For a consistent stack, py-spy stops the process for some milliseconds. If py-spy is killed during that time, the
process stays stopped. So the agent continues the process after each dump, unless it was stopped before the dump.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from agent.needs import PTRACE
from agent.tracer.processes import STOPPED, TRACING
from everstep.system.capabilities import Capability, given_to_children
from everstep.system.procfs import state_of

LEAST_S = 0.2
"""The shortest time limit of a dump, seconds."""
SETTLES_S = 0.5
"""After py-spy was killed, the state of the traced process shows within this time, seconds, whether the process
continues."""
MOST_BYTES = 4 << 20
"""Largest dump of one process, bytes; a larger dump is left out."""
PROBLEM_CHARACTERS = 200
DENIED = re.compile("permission denied|operation not permitted", re.IGNORECASE)
"""What py-spy writes if it may not read the process."""

logger = structlog.get_logger()


class StackDump(NamedTuple):
    """The result of py-spy for one process."""

    json: bytes
    """The output of py-spy; empty: there is none."""
    problem: str = ""
    """Why there is no output."""
    denied: bool = False
    """The agent does not have the right to read the process."""


def py_spy() -> str | None:
    """Return the path of py-spy in this installation, or else from the ``PATH``; None: it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def dump(pid: int, ticks: int, *, deadline: float, program: Sequence[str]) -> StackDump:
    """Read the stacks of a process.

    If the process is stopped already, py-spy reads it without stopping it. If py-spy fails to stop the process, the
    stacks are read again without stopping it, unless this is not permitted.

    Args:
        pid: Pid of the process.
        ticks: Start time of the process in clock ticks, because pids are reused.
        deadline: Deadline on the monotonic clock, seconds.
        program: py-spy, with its first arguments.
    """
    before = state_of(pid, ticks)
    if not before:
        return StackDump(b"", "it ended")
    first = StackDump(b"", "")
    if before != STOPPED:
        half = max((deadline - time.monotonic()) / 2, LEAST_S)
        first = _ask([*program, "dump", "--json", "--pid", str(pid)], pid, ticks, before, half)
        if first.json or first.denied or not state_of(pid, ticks):
            return first
    left = max(deadline - time.monotonic(), LEAST_S)
    second = _ask([*program, "dump", "--json", "--nonblocking", "--pid", str(pid)], pid, ticks, before, left)
    return second if second.json or not first.problem else first


def _ask(command: Sequence[str], pid: int, ticks: int, before: str, limit_s: float) -> StackDump:
    try:
        with given_to_children(Capability.SYS_PTRACE):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"RUST_BACKTRACE": "0"},
            )
    except OSError as error:
        return StackDump(b"", f"py-spy cannot be run: {error.strerror}")
    with process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=SETTLES_S)
            let_go(pid, ticks, before)
            return StackDump(b"", f"py-spy did not end within {limit_s:.1f} s")
        let_go(pid, ticks, before, at_once=True)
        # Another thread may have collected the exit code (``agent.monitor.programs``), so only the output is used.
        if not output.lstrip().startswith(b"["):
            words = errors.decode(errors="replace").strip().splitlines()
            if DENIED.search(" ".join(words)):
                return StackDump(b"", f"py-spy may not read its stacks; {PTRACE.remedy()}", denied=True)
            return StackDump(b"", (words[-1] if words else "py-spy wrote nothing")[:PROBLEM_CHARACTERS])
        if len(output) > MOST_BYTES:
            return StackDump(b"", f"its stacks have {len(output)} bytes, more than the limit")
        return StackDump(output)


def let_go(pid: int, ticks: int, before: str, *, at_once: bool = False) -> None:
    """Continue a process that a dump has left stopped.

    Args:
        pid: Pid of the process.
        ticks: Start time of the process in clock ticks.
        before: Its state before the dump. A process that was stopped before the dump stays stopped.
        at_once: Whether the dump ended by itself. Then the state of the process shows at once whether the process was
            left stopped.
    """
    if before == STOPPED:
        return
    until = time.monotonic() + (0.0 if at_once else SETTLES_S)
    while True:
        state = state_of(pid, ticks)
        if state == STOPPED:
            logger.warning("a stack dump left a process stopped; it is continued", pid=pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            return
        # The kernel ends the trace some time later, and a stop that py-spy requested may take effect after that.
        if not state or (state != TRACING and time.monotonic() >= until):
            return
        if time.monotonic() >= until + SETTLES_S:
            return
        time.sleep(0.002)
