"""A PostgreSQL server for one test."""

from __future__ import annotations

import contextlib
import os

import pytest

from controlplane.local import postgres
from controlplane.local.ports import Claims

SWITCHED_OFF = os.environ.get("EVERSTEP_TEST_POSTGRES") == "off"
SWITCHED_OFF_REASON = "EVERSTEP_TEST_POSTGRES=off"


class Postgres:
    """A new server, which listens on loopback and on a unix socket.

    Args:
        host: The loopback address.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        if postgres.programs() is None:
            pytest.fail(f"{postgres.HOW_TO_INSTALL}, or set EVERSTEP_TEST_POSTGRES=off to test on SQLite only.")
        self._server = postgres.Postgres()
        self._open = contextlib.ExitStack()
        self._address = self._open.enter_context(Claims()).choose(host)
        self.port = self._address.port

    @property
    def url(self) -> str:
        """The address over loopback, up to the database's name."""
        return f"postgresql+psycopg://everstep@{self._address}/"

    def socket_url(self, database: str, password: str) -> str:
        """Return the address over the unix socket. The server accepts any password."""
        return self._server.url(database, password, port=self.port)

    def start(self) -> None:
        """Start the server, for the first time or again."""
        settings = " ".join(self._server.settings(self._address.host, port=self.port))
        self._pg_ctl("-l", str(self._server.home / "server.log"), "-o", settings, "start")

    def kill(self) -> None:
        """Stop the server without waiting for its clients."""
        self._pg_ctl("-m", "immediate", "stop")

    def remove(self) -> None:
        """Remove the server's files and release its port."""
        self._server.remove()
        self._open.close()

    def _pg_ctl(self, *args: str) -> None:
        self._server.call("pg_ctl", "-D", self._server.data, "-w", *args)
