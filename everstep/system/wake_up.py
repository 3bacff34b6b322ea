"""Ends the wait of one thread for a file from another thread."""

from __future__ import annotations

import os
import select
import threading


class WakeUp:
    """A waiting thread and those that may end its wait share one of these.

    A descriptor that one thread closes while another one writes to it may be another file's by then. So this one is
    written to and closed under one lock, and to ring it once it is closed does nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wait(self, file: int, wait_s: float) -> bool:
        """Wait until a file can be read, or this is rung, which is used up by that; returns whether the file can be."""
        poll = select.poll()
        poll.register(file, select.POLLIN)
        poll.register(self._file, select.POLLIN)
        ready = [number for number, _ in poll.poll(max(wait_s, 0.0) * 1000)]
        if self._file in ready:
            os.eventfd_read(self._file)
        return file in ready

    def ring(self) -> None:
        """Let a thread that waits, or would wait next, return at once."""
        with self._lock:
            if self._file >= 0:
                os.eventfd_write(self._file, 1)

    def close(self) -> None:
        """Close it; no thread waits any more."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
