"""Splits long work in an event loop into parts, so that other tasks run in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
S = TypeVar("S")
AT_ONCE = 32
"""The number of items between two pauses. Starting a call for one item takes a tenth of a millisecond or more."""
SHARE = 0.2
"""The largest share of the loop's time for work that is repeated at every change."""

QUICK_S = 0.001
"""Work that is shorter than this needs no rest after it, seconds."""


async def in_turns(items: Iterable[S], at_once: int = AT_ONCE) -> AsyncIterator[S]:
    """Yield the items, and let other tasks of the loop run after each ``at_once`` items."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % at_once == 0:
            await asyncio.sleep(0)


async def gathered(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results as ``asyncio.gather`` does, but start the work in parts; a cancellation cancels all work."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async for coroutine in in_turns(work):
            tasks.append(asyncio.create_task(coroutine))
        return await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise


class ShareOfTime:
    """Limits repeated work to a share of the time, however often changes happen."""

    def __init__(self, share: float = SHARE) -> None:
        self._rest = 1 / share - 1
        """How many seconds of rest follow each second of work."""
        self._began = self._took_s = 0.0

    def begin(self) -> None:
        """Note that the work begins."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Note that the work is done."""
        self._took_s = time.perf_counter() - self._began

    async def rest(self) -> None:
        """Wait in proportion to the time of the last work; there is no wait after work of less than a millisecond."""
        if self._took_s > QUICK_S:
            await asyncio.sleep(self._rest * self._took_s)
