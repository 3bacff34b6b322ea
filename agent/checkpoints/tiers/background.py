"""This module interrupts threads that move gigabytes in the background of a training job, and sets their priority."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import threading

from everstep.errors import CopyInterrupted

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_THIS_THREAD = 1
_LOWEST_BEST_EFFORT = 2 << 13 | 7


class Gate:
    """Lets another thread give up a file at any moment before it gets its final name.

    It is used as the ``pace`` of ``write_shard``.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = self._passing = False

    def __call__(self, moved: int) -> None:
        """Called after a piece of ``moved`` bytes; 0: the file is about to get its final name.

        Raises:
            CopyInterrupted: the file was given up.
        """
        with self._changed:
            if self._ended:
                raise CopyInterrupted("given up: the job was stopped, or the agent ends")
            self._passing = self._passing or moved == 0

    def leave(self) -> None:
        """Record that the file is complete, or failed."""
        with self._changed:
            self._passing = False
            self._changed.notify_all()

    def end(self, patience_s: float) -> bool:
        """Give the file up, or wait for it if it is getting its final name; returns whether the write has ended."""
        with self._changed:
            self._ended = True
            return self._changed.wait_for(lambda: not self._passing, patience_s)

    @property
    def ended(self) -> bool:
        """Return whether the file was given up."""
        return self._ended


def yield_the_disk() -> None:
    """Lower this thread's disk priority below that of all other threads, if the disk's scheduler supports it.

    It uses the lowest best-effort priority and not "idle", which may wait for ever.
    """
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, _THIS_THREAD, 0, _LOWEST_BEST_EFFORT)
