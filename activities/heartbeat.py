"""The heartbeat and the request id of an activity, and two clocks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from temporalio import activity

HEARTBEAT_S = 0.4
"""The time between two heartbeats, seconds: a fifth of the heartbeat timeout of 2 s."""

Say = Callable[[str], None]
"""Shows what an activity waits for; the Web UI shows it with the pending activity."""


@contextlib.asynccontextmanager
async def heartbeating() -> AsyncIterator[Say]:
    """Send heartbeats while the body runs, so that a dead worker is noticed within the heartbeat timeout.

    The yielded function sets the text of all later heartbeats: what the activity waits for.
    """
    details: list[str] = []

    async def beat() -> None:
        while True:
            activity.heartbeat(*details)
            await asyncio.sleep(HEARTBEAT_S)

    def say(text: str) -> None:
        details[:] = [text] if text else []

    task = asyncio.create_task(beat())
    try:
        yield say
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def request_id() -> str:
    """Return the idempotency key of this activity's effects. All attempts have the same key, and each run of the
    workflow has a new key."""
    info = activity.info()
    return f"{info.workflow_id}/{info.workflow_run_id}/{info.activity_id}"


def now_ns() -> int:
    """Return the wall clock's time, nanoseconds."""
    return time.time_ns()


_BEGAN_NS = time.time_ns() - time.monotonic_ns()


def steady_ns() -> int:
    """Return the time on a clock that starts with the wall clock's time and is never adjusted, nanoseconds."""
    return _BEGAN_NS + time.monotonic_ns()
