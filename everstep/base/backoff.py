"""The waits before failed attempts are repeated."""

from __future__ import annotations

import random


class Backoff:
    """Waits that grow, each shortened at random, so that callers that failed together do not try again together.

    Args:
        first_s: The first wait, seconds, before it is shortened.
        most_s: The longest wait, seconds: a recovery is noticed within it.
        factor: Growth from one wait to the next.
        jitter: The largest part of a wait that is cut off at random.
    """

    def __init__(self, first_s: float, most_s: float, *, factor: float = 2.0, jitter: float = 0.5) -> None:
        self._first_s, self._most_s, self._factor, self._jitter = min(first_s, most_s), most_s, factor, jitter
        self._wait_s = self._first_s

    def next_s(self, lasted_s: float = 0.0) -> float:
        """The wait before the next try, seconds.

        Args:
            lasted_s: How long the last try worked, seconds; more than the longest wait counts as a success.
        """
        if lasted_s > self._most_s:
            self.reset()
        wait_s = self._wait_s
        self._wait_s = min(wait_s * self._factor, self._most_s)
        return wait_s * (1 - self._jitter * random.random())

    def reset(self) -> None:
        """Begin again with the first wait, after a success."""
        self._wait_s = self._first_s
