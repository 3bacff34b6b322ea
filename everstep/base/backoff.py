"""Computes the growing waits between repeated attempts."""

from __future__ import annotations

import random


class Backoff:
    """Waits that double from one attempt to the next.

    Each wait is shortened at random, so that callers that failed together do not try again together.

    Args:
        first_s: The first wait, seconds, before it is shortened.
        most_s: The longest wait, seconds.
        jitter: The largest share of a wait that is cut off at random, 0 to 1.
    """

    def __init__(self, first_s: float, most_s: float, *, jitter: float = 0.5) -> None:
        self._first_s, self._most_s, self._jitter = min(first_s, most_s), most_s, jitter
        self._wait_s = self._first_s

    def next_s(self, lasted_s: float = 0.0) -> float:
        """The wait before the next try, seconds.

        Args:
            lasted_s: How long the last try worked, seconds. If that is longer than the longest wait, the try counts as
                a success, and the waits begin again.
        """
        if lasted_s > self._most_s:
            self.reset()
        wait_s = self._wait_s
        self._wait_s = min(wait_s * 2, self._most_s)
        return wait_s * (1 - self._jitter * random.random())

    def reset(self) -> None:
        """Begin again with the first wait, after a success."""
        self._wait_s = self._first_s
