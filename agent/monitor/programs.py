"""This module runs a program with a deadline, after which all processes that it started are killed."""

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
"""Time in which a killed program has to disappear, seconds. The agent does not wait longer for it."""
WITH_EXIT_CODE = '"$@"; printf "\\n%s %s" "$0" "$?"'
"""A shell script that runs a program, and then prints a random mark and the exit code of the program. The agent's
``agent.launcher.processes.Reaper`` collects every child that ends, so this thread may not get the exit code itself."""

KEPT_BYTES, LAST_BYTES = 1 << 20, 4096
"""Largest parts of a program's output that are kept, bytes: the first of its beginning, the second of its end."""
NOT_RUN = (126, 127)
"""Exit codes of a shell: the first for a file that cannot be run, the second for a program that does not exist."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a program that has ended."""

    output: str
    """The program's standard output and standard error together."""
    code: int
    """The program's exit code; if a signal ended it, 128 plus the number of the signal."""


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
        raise CannotInspect(f"{command[0]} cannot be run: it is not installed, or may not be executed")
    mark = secrets.token_hex(8)
    try:
        process = subprocess.Popen(
            ["sh", "-c", WITH_EXIT_CODE, mark, program, *command[1:]],
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
        raise CannotInspect(f"{command[0]} was killed from outside, and its exit code is not known")
    if int(code) in NOT_RUN:
        raise CannotInspect(f"{command[0]} cannot be run (exit code {code}): {text.strip() or 'no output'}")
    return Ran(text, int(code))


def excerpt(output: str) -> str:
    """Return the beginning of a program's output as one line, for a message."""
    return " ".join(output.split())[:200] or "it wrote nothing"


def _read(process: subprocess.Popen[bytes], deadline_s: float) -> bytes | None:
    """Return the output of a program, shortened to its beginning and end; None: the program did not end in time."""
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
