"""Splits much work in one event loop into parts, so that other tasks run in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
S = TypeVar("S")
AT_ONCE = 32
"""Calls that are begun in one go: each takes a tenth of a millisecond or more."""
SHARE = 0.2
"""Part of the loop's time that work done at every change may take."""

QUICK_S = 0.001
"""Work that takes no longer is never followed by a rest."""


async def in_turns(items: Iterable[S], at_once: int = AT_ONCE) -> AsyncIterator[S]:
    """The items, with a turn for all others in the loop after so many of them."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % at_once == 0:
            await asyncio.sleep(0)


async def gathered(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What ``asyncio.gather`` gives, begun in turns; cancelled, all of it is cancelled."""
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
    """Keeps what is done at every change to a share of the time, however many changes there are."""

    def __init__(self, share: float = SHARE) -> None:
        self._rest = 1 / share - 1
        self._began = self._took_s = 0.0

    def begin(self) -> None:
        """The work begins."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """It is done."""
        self._took_s = time.perf_counter() - self._began

    async def rest(self) -> None:
        """Wait, unless it took less than a millisecond."""
        if self._took_s > QUICK_S:
            await asyncio.sleep(self._rest * self._took_s)
