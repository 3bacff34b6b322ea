"""What the first thread of a process waits for, by the system call that it is in.

The stack of Python ends at the function of the script that called C. The system call shows whether this function
sleeps, polls, or reads a socket. The system call is not known on architectures that are not listed, in sandboxes that
hide ``/proc/PID/syscall``, and for processes of other users.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from everstep.system.procfs import PROC


class BlockedIn(StrEnum):
    """What a thread waits for."""

    SLEEP = "sleep"
    POLL = "poll"
    """One of several sockets, pipes or other files."""
    SOCKET = "socket"
    PROGRAM = "program"
    """The end of another process."""
    FILE_LOCK = "file lock"


READ = "read"
"""A read waits for a socket only if its file is a socket."""
CALLS: Mapping[str, Mapping[int, str]] = {
    "x86_64": {
        0: READ,
        **dict.fromkeys((7, 23, 232, 270, 271, 281, 441), BlockedIn.POLL),
        **dict.fromkeys((35, 230), BlockedIn.SLEEP),
        **dict.fromkeys((42, 43, 45, 47, 288), BlockedIn.SOCKET),
        **dict.fromkeys((61, 247), BlockedIn.PROGRAM),
        **dict.fromkeys((72, 73), BlockedIn.FILE_LOCK),
    },
    "aarch64": {
        63: READ,
        **dict.fromkeys((22, 72, 73, 441), BlockedIn.POLL),
        **dict.fromkeys((101, 115), BlockedIn.SLEEP),
        **dict.fromkeys((202, 203, 207, 212, 242), BlockedIn.SOCKET),
        **dict.fromkeys((95, 260), BlockedIn.PROGRAM),
        **dict.fromkeys((25, 32), BlockedIn.FILE_LOCK),
    },
}
"""Architecture → number of a system call → what it waits for (the kernel's tables of system calls)."""


def blocked_in(pid: int, proc: Path = PROC, machine: str = "") -> BlockedIn | None:
    """Return what the first thread of a process waits for; None: for nothing in ``BlockedIn``, or it is not known.

    Args:
        pid: The process.
        proc: The folder of processes.
        machine: The architecture; empty: that of this computer.
    """
    try:
        words = (proc / str(pid) / "syscall").read_text().split()
        call = CALLS.get(machine or platform.machine(), {}).get(int(words[0]))
        if call == READ:
            return BlockedIn.SOCKET if _is_socket(proc / str(pid) / "fd" / str(int(words[1], 16))) else None
        return BlockedIn(call) if call else None
    except (OSError, ValueError, IndexError):  # "running", or it may not be read
        return None


def _is_socket(link: Path) -> bool:
    return str(link.readlink()).startswith("socket:")
