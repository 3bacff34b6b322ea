"""The progress of a snapshot of code, for people who wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from everstep.base.text import size_text

EVERY_S = 1.0
"""The time before the first line about a snapshot and between two lines, seconds. Most snapshots take less time."""


@dataclass(slots=True)
class SnapshotProgress:
    """The progress of a snapshot; another thread may read it."""

    files: int = 0
    of: int = 0
    """The number of files; 0: they are not listed yet."""
    bytes: int = 0

    @property
    def text(self) -> str:
        """The progress as a line, e.g. ``snapshot of the code: 1200 of 5000 files, 88.1 MB``."""
        if not self.of:
            return "snapshot of the code: listing its files"
        if self.files == self.of:
            return f"snapshot of the code: {self.of} files, {size_text(self.bytes)}, written to the store of versions"
        return f"snapshot of the code: {self.files} of {self.of} files, {size_text(self.bytes)}"


@contextlib.asynccontextmanager
async def showing_progress(say: Callable[[str], None], every_s: float = EVERY_S) -> AsyncIterator[SnapshotProgress]:
    """Report the progress of a snapshot at intervals, while the body runs.

    Args:
        say: Shows a line; it is called when the line has changed.
        every_s: The interval, seconds.
    """
    progress = SnapshotProgress()

    async def show() -> None:
        shown = ""
        while True:
            await asyncio.sleep(every_s)
            if (text := progress.text) != shown:
                shown = text
                say(text)

    looking = asyncio.create_task(show())
    try:
        yield progress
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
