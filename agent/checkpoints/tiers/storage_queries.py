"""Questions to storage that may hang: each is asked in a thread of its own, and a location has one question at a time.

No caller waits longer than it wants to, and to ask again while the first question still hangs costs no further thread.
The threads are not those of the event loop, where a few that hang would keep every command waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswer(OSError):
    """A location did not answer in time: nothing is known about it."""


class _Query(Generic[T]):
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.answer: Future[T] = Future()


class StorageQueries:
    """All questions of one process, by location; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queries: dict[str, _Query[object]] = {}

    def ask(self, works: Mapping[str, Callable[[], T]], patience_s: float) -> dict[str, T | Exception]:
        """Ask several locations at once; returns each answer, or why there is none.

        An answer was looked up after this call began.

        Args:
            works: For each location how it is asked.
            patience_s: How long all of them together may take, seconds.
        """
        asked = time.monotonic()
        begun = {location: self._begin(location, work) for location, work in works.items()}
        return {
            location: self._answer(location, works[location], query, asked, asked + patience_s)
            for location, query in begun.items()
        }

    def _begin(self, location: str, work: Callable[[], T]) -> _Query[object]:
        """The question that is under way at a location; asks it where there is none."""
        with self._lock:
            if location in self._queries:
                return self._queries[location]
            query = self._queries[location] = _Query()
        threading.Thread(target=self._run, args=(location, query, work), name=f"ask {location}", daemon=True).start()
        return query

    def _run(self, location: str, query: _Query[object], work: Callable[[], object]) -> None:
        found: object = None
        failed: Exception | None = None
        try:
            found = work()
        except Exception as error:  # whatever a driver raises
            failed = error
        with self._lock:
            del self._queries[location]
        if failed is None:
            query.answer.set_result(found)
        else:
            query.answer.set_exception(failed)

    def _answer(
        self, location: str, work: Callable[[], T], query: _Query[object], asked: float, deadline: float
    ) -> T | Exception:
        while True:
            try:
                failed = query.answer.exception(max(deadline - time.monotonic(), 0))
            except TimeoutError:
                return NoAnswer(f"no answer for {time.monotonic() - query.began:.0f} s")
            if query.began >= asked:
                return failed if isinstance(failed, Exception) else query.answer.result()  # type: ignore[return-value]
            query = self._begin(location, work)  # that question is older than this call: its answer may be too


QUERIES = StorageQueries()
"""The questions of this process."""
