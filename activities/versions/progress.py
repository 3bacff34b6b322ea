"""How far a snapshot of code has come, for people who wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from everstep.base.text import size_text

EVERY_S = 1.0
"""Between two lines about a snapshot; the first one comes after as long: most are over by then."""


@dataclass(slots=True)
class SnapshotProgress:
    """How far a snapshot has come; another thread may look at it."""

    files: int = 0
    of: int = 0
    """0: its files are not listed yet."""
    bytes: int = 0

    @property
    def text(self) -> str:
        """For people: ``1200 of 5000 files, 88.1 MB``."""
        if not self.of:
            return "snapshot of the code: its files are listed"
        if self.files == self.of:
            return f"snapshot of the code: {self.of} files, {size_text(self.bytes)}, go into the store of versions"
        return f"snapshot of the code: {self.files} of {self.of} files, {size_text(self.bytes)}"


@contextlib.asynccontextmanager
async def telling(say: Callable[[str], None], every_s: float = EVERY_S) -> AsyncIterator[SnapshotProgress]:
    """Tell how far a snapshot is, again and again, as long as the body runs.

    Args:
        say: Takes a line, each time another one.
        every_s: Seconds between two looks.
    """
    progress = SnapshotProgress()

    async def look() -> None:
        told = ""
        while True:
            await asyncio.sleep(every_s)
            if (text := progress.text) != told:
                told = text
                say(text)

    looking = asyncio.create_task(look())
    try:
        yield progress
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
