"""Reads files on disks that may hang: each read has its own thread, and no other work waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from everstep.errors import AgentError

MOST = 64
"""The number of reads that may run at the same time; further reads are refused."""

T = TypeVar("T")


class Reads:
    """The reads of an agent. They do not use the event loop's own threads, which must stay free for other work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0

    async def do(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run ``work`` in a thread of its own and return its result.

        Raises:
            TimeoutError: the read takes longer than ``timeout_s``; its thread continues.
            AgentError: too many reads hang already.
            Exception: the error that ``work`` raises.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as raised:
                error = raised
            with self._lock:
                self._under_way -= 1
            with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile, and its loop is closed
                loop.call_soon_threadsafe(finish, result, error)

        with self._lock:
            if self._under_way >= MOST:
                raise AgentError(
                    f"{self._under_way} reads of this machine's disks do not end: no further one is started"
                )
            self._under_way += 1
        threading.Thread(target=run, name="read", daemon=True).start()
        async with asyncio.timeout(timeout_s):
            return await done
