"""How long to wait before something that failed is tried again."""

from __future__ import annotations

import random


class Backoff:
    """Waits that grow, each shortened at random, so that many that failed together do not try again together.

    Args:
        first_s: The first wait, seconds, before it is shortened.
        most_s: The longest one, seconds: what comes back is noticed within it.
        factor: Growth from one wait to the next.
        jitter: The largest part of a wait that chance takes away.
    """

    def __init__(self, first_s: float, most_s: float, *, factor: float = 2.0, jitter: float = 0.5) -> None:
        self._first_s, self._most_s, self._factor, self._jitter = min(first_s, most_s), most_s, factor, jitter
        self._wait_s = self._first_s

    def next_s(self, lasted_s: float = 0.0) -> float:
        """The wait before the next try, seconds.

        Args:
            lasted_s: How long the last one went well, seconds; longer than the longest wait, and it was a success.
        """
        if lasted_s > self._most_s:
            self.reset()
        wait_s = self._wait_s
        self._wait_s = min(wait_s * self._factor, self._most_s)
        return wait_s * (1 - self._jitter * random.random())

    def reset(self) -> None:
        """It succeeded: the next wait is the first one again."""
        self._wait_s = self._first_s
