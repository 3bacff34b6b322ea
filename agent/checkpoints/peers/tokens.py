"""The keys of the data port: one for each job, as long as this agent lives."""

from __future__ import annotations

import secrets
import threading

TOKEN_BYTES = 32


class Tokens:
    """Random tokens by job; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, bytes] = {}

    def issue(self, job: str) -> bytes:
        """The token of a job, made when first asked for."""
        with self._lock:
            return self._tokens.setdefault(job, secrets.token_bytes(TOKEN_BYTES))

    def of(self, job: str) -> bytes | None:
        """The token of a job, None when none was issued."""
        with self._lock:
            return self._tokens.get(job)

    def forget(self, job: str) -> None:
        """The job is over: its token opens nothing any more."""
        with self._lock:
            self._tokens.pop(job, None)
