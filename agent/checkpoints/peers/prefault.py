"""This module prepares the memory of a slot: the kernel clears its pages in a thread while the bytes arrive."""

from __future__ import annotations

import threading

from everstep.slots.file import SlotFile

PIECE = 4 << 20
"""The number of bytes that are prepared at a time; this takes about a millisecond."""


class Prefault:
    """Makes the memory for a slot's payload writable, from its beginning on, after ``receive`` has begun the slot.

    Args:
        file: File of the slot. It must not be used for anything else before ``close``.
        total: Bytes of the payload.
    """

    def __init__(self, file: SlotFile, total: int) -> None:
        self._file = file
        self._total = total
        self._ready = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="memory for a slot", daemon=True)
        self._thread.start()

    def reach(self, stop: int) -> None:
        """Wait until the payload may be written up to ``stop``.

        Raises:
            CheckpointError: the file system has no room.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready >= stop or self._error is not None)
            if self._error is not None and self._ready < stop:
                raise self._error

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        ready, error = 0, None
        while ready < self._total and not self._closed and error is None:
            stop = min(ready + PIECE, self._total)
            try:
                self._file.make_present(stop)
                ready = stop
            except BaseException as problem:
                error = problem
            with self._changed:
                self._ready, self._error = ready, error
                self._changed.notify_all()
