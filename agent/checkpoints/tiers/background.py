"""Manners of the threads that move gigabytes beside a training job."""

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
    """Lets a file on its way be given up at any moment until it counts; the ``pace`` of ``write_shard``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = self._passing = False

    def __call__(self, moved: int) -> None:
        """After a piece of ``moved`` bytes; 0: the file is going to count now.

        Raises:
            CopyInterrupted: it was given up.
        """
        with self._changed:
            if self._ended:
                raise CopyInterrupted("given up: the job was stopped, or the agent ends")
            self._passing = self._passing or moved == 0

    def leave(self) -> None:
        """The file is done, or failed."""
        with self._changed:
            self._passing = False
            self._changed.notify_all()

    def end(self, patience_s: float) -> bool:
        """Give the file up, or wait until it is done where it counts already; whether nothing comes any more."""
        with self._changed:
            self._ended = True
            return self._changed.wait_for(lambda: not self._passing, patience_s)

    @property
    def ended(self) -> bool:
        """Whether it was given up."""
        return self._ended


def yield_the_disk() -> None:
    """Let the reads and writes of all other threads go before those of this one, where the disk's scheduler minds.

    The lowest best-effort priority and not "idle", which may wait for ever.
    """
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, _THIS_THREAD, 0, _LOWEST_BEST_EFFORT)
