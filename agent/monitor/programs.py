"""Runs a program of the machine for an inspection: with a deadline, and with all that it starts ended after it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from everstep.errors import CannotLook

ENDS_S = 1.0
"""A program that was killed has this long to be gone; then it is left to itself (ours)."""


def output_of(command: Sequence[str], deadline_s: float) -> str:
    """What a program writes, to both of its outputs.

    How it ended is not told: an agent collects all its children that end, wherever they were started
    (``agent.launcher.processes.Reaper``), so that who started a program may not learn its exit code.

    Raises:
        CannotLook: it cannot be run, or did not end in time.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise CannotLook(f"{command[0]} cannot be run ({error.strerror}): check its path and mode") from error
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=ENDS_S)
        raise CannotLook(f"{' '.join(command)} did not end within {deadline_s:g} s") from None
    return output.decode(errors="replace")
