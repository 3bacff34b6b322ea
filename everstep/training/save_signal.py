"""Sends the save signal: one byte in a FIFO, which notifies the agent that a save is committed."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

REOPEN_S = 1.0
"""Time after which a FIFO that could not be opened or written is opened again, seconds."""


class SaveSignal:
    """The rank's end of the FIFO.

    The agent also polls, so a lost byte delays it only by a fraction of a second.

    Args:
        path: The FIFO; None: there is none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._descriptor = -1
        self._not_before = 0.0

    def send(self) -> None:
        """Write one byte, without waiting and without raising errors."""
        if self._path is None or not self._opened():
            return
        try:
            os.write(self._descriptor, b"\x01")
        except BlockingIOError:
            pass  # the FIFO is full, so the agent is going to read it
        except OSError:  # its reader is gone
            self.close()
            self._not_before = time.monotonic() + REOPEN_S

    def close(self) -> None:
        """Close the FIFO."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _opened(self) -> bool:
        now = time.monotonic()
        if self._descriptor < 0 and now >= self._not_before and self._path is not None:
            self._not_before = now + REOPEN_S
            with contextlib.suppress(OSError):  # there is no such FIFO, or it has no reader
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return self._descriptor >= 0
