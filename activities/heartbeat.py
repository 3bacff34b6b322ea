"""What every activity needs: a heartbeat of its own and an id for its effects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from temporalio import activity

HEARTBEAT_S = 0.4
"""Between two heartbeats, seconds: a fifth of the heartbeat timeout of 2 s."""

Say = Callable[[str], None]
"""Takes what an activity waits for; the Web UI shows it with the pending activity."""


@contextlib.asynccontextmanager
async def heartbeating() -> AsyncIterator[Say]:
    """Heartbeat while the body runs, so that a dead worker is noticed within the heartbeat timeout.

    The value says what is waited for, in each further heartbeat.
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
    """The idempotency key of this activity's effects: the same for every attempt, new for every run."""
    info = activity.info()
    return f"{info.workflow_id}/{info.workflow_run_id}/{info.activity_id}"


def now_ns() -> int:
    """Wall clock, nanoseconds."""
    return time.time_ns()


_BEGAN_NS = time.time_ns() - time.monotonic_ns()


def steady_ns() -> int:
    """Time now, on a clock that is the wall clock when the process begins and is never set after that."""
    return _BEGAN_NS + time.monotonic_ns()
