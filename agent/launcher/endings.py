"""Ranks that begin to end: told by the kernel before their memory is given back, and so long before they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from agent.launcher.processes import End
from everstep.system.end_notice import EndNotice
from everstep.system.procfs import process_of


def ending_of(pid: int, ticks: int) -> End | None:
    """How a process ends that has begun to and is not gone, by a signal or a code that is not 0.

    Args:
        pid: Of the process.
        ticks: When it started: another process may have its number by now.

    Returns:
        None: it has not begun to end, ended well, is gone, or may not be asked.
    """
    process = process_of(pid)
    # A program that the process became (exec) begins with such a notice as well: it does not end.
    if process is None or process.start != ticks or not process.is_ending or not process.exit_status:
        return None
    return End.of(process.exit_status)


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
        if notice.wait() and not notice.dropped:
            with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile, and its loop is closed
                self._loop.call_soon_threadsafe(self._begins)
