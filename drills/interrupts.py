"""Ending a drill early without leaving its cluster behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; after Ctrl-C or SIGTERM the cluster is torn down, then KeyboardInterrupt is raised."""

    async def guarded() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        await asyncio.wait([task])
        with suppress(asyncio.CancelledError):
            return task.result()
        raise KeyboardInterrupt

    return asyncio.run(guarded())
