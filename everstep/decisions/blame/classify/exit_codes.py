"""What an exit code says, and what it does not."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decisions.blame.classify.rule import FaultClass
from everstep.model.owner import Owner
from everstep.system.signals import signal_name

SHELL_SIGNALS = 128
"""Added to a signal's number by shells, containers and Slurm."""
LAST_SIGNAL = 64


@dataclass(frozen=True, slots=True)
class ExitReading:
    """An exit code in words, and what it stands for when the logs say nothing."""

    code: int
    text: str
    fault: FaultClass
    owner: Owner
    reason: str


CODES: dict[int, tuple[str, FaultClass, Owner, str]] = {
    0: ("ended with code 0", FaultClass.NO_FAILURE, Owner.UNKNOWN, "ended-with-0"),
    2: (
        "exit code 2: of argparse and shells wrong usage, of others anything",
        FaultClass.UNKNOWN,
        Owner.UNKNOWN,
        "exit-code",
    ),
    124: ("exit code 124: a time-out of the command timeout", FaultClass.HANG, Owner.UNKNOWN, "ended-by-timeout"),
    126: ("exit code 126: the command cannot be executed", FaultClass.PERMISSION, Owner.UNKNOWN, "not-executable"),
    127: ("exit code 127: the command was not found", FaultClass.DEPENDENCY, Owner.CODE, "command-not-found"),
}
"""Codes with a meaning of their own, by the conventions of shells and of coreutils."""
SIGNALS: dict[str, tuple[str, FaultClass, str]] = {
    "SIGKILL": ("by whom is not said: the kernel, a scheduler, an agent or a person", FaultClass.KILLED, "sigkill"),
    "SIGTERM": ("asked to end, by whom is not said", FaultClass.TERMINATED, "sigterm"),
    "SIGINT": ("interrupted", FaultClass.INTERRUPTED, "interrupted"),
    "SIGABRT": ("it aborted itself: an assertion, a C++ exception, NCCL's watchdog", FaultClass.CRASHED, "sigabrt"),
    "SIGSEGV": ("segmentation fault", FaultClass.CRASHED, "fatal-python-error"),
    "SIGBUS": ("bus error: often a full /dev/shm or a lost file mapping", FaultClass.CRASHED, "fatal-python-error"),
    "SIGILL": ("illegal instruction", FaultClass.CRASHED, "fatal-python-error"),
    "SIGFPE": ("arithmetic error", FaultClass.CRASHED, "fatal-python-error"),
}


def read_exit_code(code: int) -> ExitReading:
    """A code as a shell tells it (137), or as Python's subprocess does (-9)."""
    if code in CODES:
        return ExitReading(code, *CODES[code])
    number = -code if code < 0 else code - SHELL_SIGNALS
    if 0 < number <= LAST_SIGNAL:
        name = signal_name(number)
        text, fault, reason = SIGNALS.get(name, ("", FaultClass.KILLED, "ended-by-signal"))
        return ExitReading(code, f"{name}: {text}" if text else f"ended by {name}", fault, Owner.UNKNOWN, reason)
    return ExitReading(code, f"exit code {code}: the program's own", FaultClass.UNKNOWN, Owner.UNKNOWN, "exit-code")
