"""Runs a program of the machine for an inspection, with a deadline; all processes that it starts are ended after it."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from everstep.errors import CannotInspect

ENDS_S = 1.0
"""A program that was killed has this long to be gone; then it is left to itself."""
TELLS_CODE = '"$@"; printf "\\n%s %s" "$0" "$?"'
"""An agent collects all its children that end, wherever they were started (``agent.launcher.processes.Reaper``), so the
thread that started a program may not get its exit code. A shell writes it behind the output, after a random mark."""

KEPT_BYTES, LAST_BYTES = 1 << 20, 4096
"""How much of a program's output is kept: of its beginning, and of its end."""
NOT_RUN = (126, 127)
"""Exit codes by which a shell says that a program is none, or is not there."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a program that has ended."""

    output: str
    """The text of both of its outputs."""
    code: int
    """Its exit code; 128 and the number of a signal that ended it."""


def run(command: Sequence[str], deadline_s: float, env: Mapping[str, str] | None = None) -> Ran:
    """Run a program to its end.

    Args:
        command: The program, by path or by name, with its arguments.
        deadline_s: Seconds until the program and all processes that it started are killed.
        env: Variables in addition to those of this process.

    Raises:
        CannotInspect: the program cannot be run, did not end in time, or its exit status is not known.
    """
    program = shutil.which(command[0])
    if program is None:
        raise CannotInspect(f"{command[0]} cannot be run: it is not there, or may not be executed")
    mark = secrets.token_hex(8)
    try:
        process = subprocess.Popen(
            ["sh", "-c", TELLS_CODE, mark, program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | (env or {}),
        )
    except OSError as error:
        raise CannotInspect(f"{command[0]} cannot be run ({error.strerror})") from error
    output = _read(process, deadline_s)
    if output is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)
        raise CannotInspect(f"{' '.join(command)} did not end within {deadline_s:g} s")
    text, _, code = output.decode(errors="replace").rpartition(f"\n{mark} ")
    if not code.isdecimal():
        raise CannotInspect(f"{command[0]} was ended from outside")
    if int(code) in NOT_RUN:
        raise CannotInspect(f"{command[0]} cannot be run (exit code {code}): {text.strip() or 'no output'}")
    return Ran(text, int(code))


def _read(process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    """What a program writes until it has ended, of much the beginning and the end; None: it did not end in time."""
    assert process.stdout is not None
    deadline, beginning, end = time.monotonic() + deadline_s, b"", b""
    poll = select.poll()
    with process.stdout as output:
        poll.register(output, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0 and poll.poll(left_s * 1000):
            part = os.read(output.fileno(), KEPT_BYTES)
            if not part:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(left_s, ENDS_S))
                return beginning + end
            room = KEPT_BYTES - len(beginning)
            beginning += part[:room]
            end = (end + part[room:])[-LAST_BYTES:]
    return None
