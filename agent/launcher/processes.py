"""This module detects that a process ends, determines how it ended, and kills sessions of processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from everstep.system.end_notice import EndNotice
from everstep.system.procfs import environment, is_alive, living, process_of, start_ticks

PR_SET_CHILD_SUBREAPER = 36
REMEMBERED_ENDS = 1024
NO_SESSION = -1
STATUS_PATIENCE_S = 0.2
"""The agent waits this long for the exit status of a process that has ended, seconds."""


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended; ``unknown`` if its parent died first."""

    kind: Literal["code", "signal", "unknown"]
    value: int
    time_ns: int

    @classmethod
    def of(cls, status: int, time_ns: int = 0) -> End:
        """Convert a wait status; ``time_ns``: when the process ended, nanoseconds, 0: now."""
        code = os.waitstatus_to_exitcode(status)
        return cls("signal" if code < 0 else "code", abs(code), time_ns or time.time_ns())


def family_of(leader: int, variable: str = "") -> list[int]:
    """Return the processes of a session, its leader included, and processes that have an environment variable."""
    return [
        process.pid
        for process in living()
        if process.session == leader or (variable and variable.encode() in environment(process.pid))
    ]


def kill_session(leader: int, variable: str = "") -> None:
    """Kill a session leader and all processes that it started.

    Args:
        leader: Pid of the session leader.
        variable: ``NAME=value`` in the environment of its children, which finds children with their own session.
    """
    for _ in range(20):  # a process that is forked meanwhile is killed in the next round
        members = family_of(leader, variable)
        if not members:
            return
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_family(pid: int, ticks: int, variable: str = "") -> None:
    """Kill the session of a leader that may have ended, and never another process that reuses its pid.

    The kernel does not reuse a pid while a session has this id. So if another process has the pid, no process of the
    session is left.

    Args:
        pid: Pid of the leader.
        ticks: Start time of the leader in clock ticks.
        variable: See ``kill_session``.
    """
    is_reused = start_ticks(pid) not in (0, ticks)
    kill_session(NO_SESSION if is_reused else pid, variable)


class Reaper:
    """Adopts the orphans of this process's children, and remembers how children ended.

    Args:
        others: Called with the pid and the start time of a process that is not a child of this process; returns how
            that process ended. None: the ends of such processes are not known.
    """

    def __init__(self, others: Callable[[int, int], Awaitable[End | None]] | None = None) -> None:
        self._ends: OrderedDict[int, End] = OrderedDict()
        self._others = others

    def install(self) -> None:
        """Become a subreaper and reap on SIGCHLD; needs the running loop."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)

    def reap(self) -> None:
        """Collect every child that ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ends[pid] = End.of(status)
            if len(self._ends) > REMEMBERED_ENDS:
                self._ends.popitem(last=False)

    def forget(self, pid: int) -> None:
        """Forget the end of an earlier process whose pid a living process has now."""
        self._ends.pop(pid, None)

    async def end_of(self, pid: int, ticks: int) -> End:
        """Return how a process ended; ``unknown``: it was not a child of this process, and ``others`` has no answer."""
        deadline = time.monotonic() + STATUS_PATIENCE_S
        while time.monotonic() < deadline:
            self.reap()
            if end := self._ends.pop(pid, None):
                return end
            if self._others and (end := await self._others(pid, ticks)):
                return end
            await asyncio.sleep(0.01)
        return End("unknown", 0, time.time_ns())


class Watch:
    """Calls back once, within milliseconds after the end of a process, or at once if it has ended already.

    Args:
        pid: Pid of the process.
        ticks: Start time of the process in clock ticks, because pids are reused.
        ended: Called in the loop.
    """

    def __init__(self, pid: int, ticks: int, ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._descriptor = -1
        with contextlib.suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)
        # The start time is compared after the descriptor is open, because the descriptor stays with its process.
        if self._descriptor < 0 or start_ticks(pid) != ticks:
            self.close()
            self._loop.call_soon(ended)
            return
        self._loop.add_reader(self._descriptor, self._ready)

    def _ready(self) -> None:
        self.close()
        self._ended()

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


async def wait_gone(pid: int, ticks: int, timeout_s: float) -> bool:
    """Wait until a process has ended; returns False if the time runs out first."""
    deadline = time.monotonic() + timeout_s
    while is_alive(pid, ticks):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True


def ending_of(pid: int, ticks: int) -> End | None:
    """Return how a process that still exists is ending, if it ends by a signal or an exit code other than 0.

    Args:
        pid: Pid of the process.
        ticks: Start time of the process in clock ticks, because pids are reused.

    Returns:
        None: the process is not ending, ends with code 0, does not exist any more, or cannot be read.
    """
    process = process_of(pid)
    # A process that runs another program (exec) gives the same notice, but does not end.
    if process is None or process.start != ticks or not process.is_ending or not process.exit_status:
        return None
    return End.of(process.exit_status)


class EndingWatch:
    """Calls back once when a process begins to end; the watch has its own thread.

    Args:
        notice: End notice of the process; None: the beginning of its end is not detected.
        begins: Called in the loop.
    """

    def __init__(self, notice: EndNotice | None, begins: Callable[[], None]) -> None:
        self._notice = notice
        self._loop = asyncio.get_running_loop()
        self._begins = begins
        if notice is not None:
            threading.Thread(target=self._wait, args=(notice,), name="ending", daemon=True).start()

    def close(self) -> None:
        """Stop watching; the thread ends within ``CHECK_S`` of ``end_notice``."""
        if self._notice is not None:
            self._notice.dropped = True

    def _wait(self, notice: EndNotice) -> None:
        if notice.wait() and not notice.dropped:
            with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile, and its loop is closed
                self._loop.call_soon_threadsafe(self._begins)
