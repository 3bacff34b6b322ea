"""Ranks that begin to end: told by the kernel before their memory is given back, and so long before they are gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from agent.launcher.processes import End
from everstep.system.end_notice import EndNotice
from everstep.system.processes import PROC

EXITING = 0x4
"""PF_EXITING, a flag of a thread that ends: nothing of its program runs any more."""
_FLAGS, _START, _EXIT_CODE = 6, 19, 49
"""Fields of /proc/<pid>/stat that follow the name."""


def ending_of(pid: int, ticks: int) -> End | None:
    """How a process ends that has begun to and is not gone, by a signal or a code that is not 0.

    Args:
        pid: Of the process.
        ticks: When it started: another process may have its number by now.

    Returns:
        None: it has not begun to end, ended well, is gone, or may not be asked.
    """
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    status = int(fields[_EXIT_CODE])
    # A program that the process became (exec) begins with such a notice as well: it does not end.
    if int(fields[_START]) != ticks or not int(fields[_FLAGS]) & EXITING or not status:
        return None
    return End.of(status)


class EndingWatch:
    """Calls back once when a process begins to end, in a thread that waits for nothing else.

    Args:
        notice: Of the process; None: nobody will tell.
        begins: Called in the loop.
    """

    def __init__(self, notice: EndNotice | None, begins: Callable[[], None]) -> None:
        self._notice = notice
        self._loop = asyncio.get_running_loop()
        self._begins = begins
        if notice is not None:
            threading.Thread(target=self._wait, args=(notice,), name="ending", daemon=True).start()

    def close(self) -> None:
        """Wait no longer."""
        if self._notice is not None:
            self._notice.dropped = True

    def _wait(self, notice: EndNotice) -> None:
        if notice.wait() and not notice.dropped and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begins)
