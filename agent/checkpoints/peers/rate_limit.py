"""This module limits the bytes per second that a machine sends, so that backups leave the network to training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.05
"""After a pause, as many bytes may be sent at once as the rate permits in this time, seconds."""


class Limiter:
    """A token bucket that several threads share.

    Args:
        bytes_per_s: Rate in bytes per second; 0: no limit.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def delay(self, count: int) -> float:
        """Return the seconds to wait before sending ``count`` bytes; the bytes count as sent."""
        if self.bytes_per_s <= 0:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(self._free_at, now - BURST_S)
            self._free_at = start + count / self.bytes_per_s
            return max(0.0, start - now)

    def piece(self, wanted: int) -> int:
        """Return the size of the next piece, at most ``wanted``. Even at a slow rate, a piece takes at most 0.25 s."""
        return min(wanted, max(4096, int(self.bytes_per_s / 4))) if self.bytes_per_s > 0 else wanted
