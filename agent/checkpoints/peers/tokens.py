"""The keys of the data port: each job has its own key while this agent lives."""

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
        """Return the token of a job, which is made at the first call."""
        with self._lock:
            return self._tokens.setdefault(job, secrets.token_bytes(TOKEN_BYTES))

    def of(self, job: str) -> bytes | None:
        """Return the token of a job; None: it has no token."""
        with self._lock:
            return self._tokens.get(job)

    def forget(self, job: str) -> None:
        """Forget the token of a job that is over; no connection with the token is accepted any more."""
        with self._lock:
            self._tokens.pop(job, None)
