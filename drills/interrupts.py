"""Runs a drill so that Ctrl-C or SIGTERM also takes its cluster down."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Ctrl-C and SIGTERM cancel it, so that it takes its cluster down.

    Raises:
        KeyboardInterrupt: the coroutine was cancelled.
    """

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
