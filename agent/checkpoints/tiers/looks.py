"""Looks at storage that may hang: each has a thread of its own, and a place that does not answer has one at most.

Nobody waits longer than he wants to, and whoever asks again while the first
look still hangs costs no further thread. The threads are not those of the event
loop, where a few that hang would keep every command waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswer(OSError):
    """A place did not answer in time: nothing is known of it."""


class _Look(Generic[T]):
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.found: Future[T] = Future()


class Looks:
    """All looks of one process, by place; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks: dict[str, _Look[object]] = {}

    def at(self, works: Mapping[str, Callable[[], T]], patience_s: float) -> dict[str, T | Exception]:
        """Look at several places at once; returns what was found at each, or why nothing is known.

        What is returned was looked up after this call began.

        Args:
            works: For each place how to look there.
            patience_s: How long all of them together may take, seconds.
        """
        asked = time.monotonic()
        begun = {place: self._begin(place, work) for place, work in works.items()}
        return {
            place: self._found(place, works[place], look, asked, asked + patience_s) for place, look in begun.items()
        }

    def _begin(self, place: str, work: Callable[[], T]) -> _Look[object]:
        """The look that is under way at a place; starts one where there is none."""
        with self._lock:
            if place in self._looks:
                return self._looks[place]
            look = self._looks[place] = _Look()
        threading.Thread(target=self._run, args=(place, look, work), name=f"look at {place}", daemon=True).start()
        return look

    def _run(self, place: str, look: _Look[object], work: Callable[[], object]) -> None:
        found: object = None
        failed: Exception | None = None
        try:
            found = work()
        except Exception as error:  # whatever a driver raises
            failed = error
        with self._lock:
            del self._looks[place]
        if failed is None:
            look.found.set_result(found)
        else:
            look.found.set_exception(failed)

    def _found(
        self, place: str, work: Callable[[], T], look: _Look[object], asked: float, deadline: float
    ) -> T | Exception:
        while True:
            try:
                failed = look.found.exception(max(deadline - time.monotonic(), 0))
            except TimeoutError:
                return NoAnswer(f"no answer for {time.monotonic() - look.began:.0f} s")
            if look.began >= asked:
                return failed if isinstance(failed, Exception) else look.found.result()  # type: ignore[return-value]
            look = self._begin(place, work)  # that one began before we asked: it may not have seen all


LOOKS = Looks()
"""Those of this process."""
