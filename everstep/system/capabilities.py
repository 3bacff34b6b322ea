"""What the kernel permits this process beyond its user: Linux capabilities.

A service manager gives capabilities to a process of an ordinary user as *ambient* capabilities, which every program
that the process starts gets too. So an agent keeps its own, and starts ranks without them. Each thread has its own set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from everstep.system.procfs import PROC

_AMBIENT, _RAISE, _LOWER, _CLEAR_ALL = 47, 2, 3, 4
"""PR_CAP_AMBIENT, and its operations (prctl(2))."""
_libc = ctypes.CDLL(None, use_errno=True)


class Capability(IntEnum):
    """A capability that everstep can use, with the kernel's number."""

    IPC_LOCK = 14
    """Lock any amount of memory."""
    SYS_PTRACE = 19
    """Read the memory of processes that are not below this one."""
    SYS_RESOURCE = 24
    """Protect a process from being killed for lack of memory."""
    SYSLOG = 34
    """Read the kernel log."""


def has(capability: Capability) -> bool:
    """Whether this thread may use a capability."""
    lines = (line.split(":") for line in (PROC / "thread-self/status").read_text().splitlines())
    permitted = next(int(value, 16) for name, value, *_ in lines if name == "CapEff")
    return bool(permitted >> capability & 1)


def keep_from_children() -> None:
    """Give no capability to programs that this thread, or a later thread of it, starts. Root's programs get theirs."""
    _libc.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)


@contextmanager
def given_to_children(capability: Capability) -> Iterator[None]:
    """Give a capability to the programs that this thread starts meanwhile, if this process may give it away."""
    raised = _libc.prctl(_AMBIENT, _RAISE, int(capability), 0, 0) == 0
    try:
        yield
    finally:
        if raised:
            _libc.prctl(_AMBIENT, _LOWER, int(capability), 0, 0)
