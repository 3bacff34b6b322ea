"""Lets one thread end another thread's wait for a file."""

from __future__ import annotations

import os
import select
import threading


class WakeUp:
    """Shared by a thread that waits for a file and the threads that may end its wait.

    If a thread closed the descriptor while another thread wrote to it, the write could reach a file that had just got
    the same number. So ``ring`` and ``close`` hold a lock, and ``ring`` does nothing after ``close``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wait(self, file: int, wait_s: float) -> bool:
        """Wait until a file can be read or ``ring`` is called; returns whether the file can be read.

        Each call of ``ring`` ends one wait.
        """
        poll = select.poll()
        poll.register(file, select.POLLIN)
        poll.register(self._file, select.POLLIN)
        ready = [number for number, _ in poll.poll(max(wait_s, 0.0) * 1000)]
        if self._file in ready:
            os.eventfd_read(self._file)
        return file in ready

    def ring(self) -> None:
        """End the current wait, or the next one if no thread waits."""
        with self._lock:
            if self._file >= 0:
                os.eventfd_write(self._file, 1)

    def close(self) -> None:
        """Close the descriptor, once no thread waits."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
