"""What every activity needs: a heartbeat of its own and an id for its effects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from temporalio import activity

HEARTBEAT_S = 0.4
"""Between two heartbeats, seconds: a fifth of the heartbeat timeout of 2 s."""


@contextlib.asynccontextmanager
async def heartbeating() -> AsyncIterator[None]:
    """Heartbeat while the body runs, so that a dead worker is noticed within the heartbeat timeout."""

    async def beat() -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(HEARTBEAT_S)

    task = asyncio.create_task(beat())
    try:
        yield
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
