"""This module queries storage that may hang: each query has its own thread, and a location has one query at a time.

No caller waits longer than its limit, and if a caller asks again while the first query still hangs, no further thread
is started. The event loop's threads are not used, because a few queries that hang would block every command.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswer(OSError):
    """Raised if a location did not answer in time: nothing is known about it."""


class _Query(Generic[T]):
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.answer: Future[T] = Future()


class StorageQueries:
    """All queries of one process, by location; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queries: dict[str, _Query[object]] = {}

    def ask(self, works: Mapping[str, Callable[[], T]], patience_s: float) -> dict[str, T | Exception]:
        """Query several locations at once; returns each answer, or the error.

        Every answer comes from a query that began after this call.

        Args:
            works: Location → the query.
            patience_s: Time limit for all queries together, seconds.
        """
        asked = time.monotonic()
        begun = {location: self._begin(location, work) for location, work in works.items()}
        return {
            location: self._answer(location, works[location], query, asked, asked + patience_s)
            for location, query in begun.items()
        }

    def _begin(self, location: str, work: Callable[[], T]) -> _Query[object]:
        """Return the running query of a location; starts a query if there is none."""
        with self._lock:
            if location in self._queries:
                return self._queries[location]
            query = self._queries[location] = _Query()
        threading.Thread(target=self._run, args=(location, query, work), name=f"ask {location}", daemon=True).start()
        return query

    def _run(self, location: str, query: _Query[object], work: Callable[[], object]) -> None:
        result: object = None
        failed: Exception | None = None
        try:
            result = work()
        except Exception as error:  # a driver may raise anything
            failed = error
        with self._lock:
            del self._queries[location]
        if failed is None:
            query.answer.set_result(result)
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
            query = self._begin(location, work)  # the query is older than this call, and so may be its answer


QUERIES = StorageQueries()
"""The queries of this process."""
