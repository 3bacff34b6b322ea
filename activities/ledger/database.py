"""Connections to the ledger's database, transactions and errors."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from everstep.errors import LedgerError

BUSY_TIMEOUT_S = 15.0
"""The longest wait of a writer for another writer, seconds."""
CONNECT_TIMEOUT_S = 5
"""The time limit for connecting to PostgreSQL, seconds."""
POOL_SIZE = 4
_LOCK_CLASS = 0x45565354  # "EVST": no other program uses this class of advisory locks
_WRITE = "everstep_write"
_BOUNDS = (
    "SELECT set_config('lock_timeout', :busy, true), set_config('statement_timeout', :frozen, true), "
    "set_config('idle_in_transaction_session_timeout', :frozen, true)"
)


class LedgerUrl:
    """The address of a ledger: ``sqlite:///FILE`` or ``postgresql://USER@HOST/DATABASE``.

    Raises:
        LedgerError: the URL has neither form.
    """

    def __init__(self, text: str) -> None:
        try:
            url = make_url(text)
        except ArgumentError:
            url = URL.create("")
        match url.get_backend_name():
            case "sqlite" if url.database and url.database != ":memory:":
                self.url = url.set(drivername="sqlite")
            case "postgresql":
                self.url = url.set(drivername="postgresql+psycopg")
            case _:
                raise LedgerError(
                    f"{text!r} is not the URL of a ledger: use sqlite:////absolute/path/ledger.db "
                    "or postgresql+psycopg://user@host/database"
                )

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    @property
    def file(self) -> Path | None:
        """The database file; None for PostgreSQL."""
        return Path(self.url.database or "") if self.url.get_backend_name() == "sqlite" else None


def connect(url: LedgerUrl) -> Engine:
    """Return an engine for a ledger; SQLite is in WAL mode, so that readers never wait for a writer."""
    with explained(url):
        if url.file is None:
            return create_engine(
                url.url,
                pool_size=POOL_SIZE,
                max_overflow=0,
                pool_pre_ping=True,
                connect_args={"connect_timeout": CONNECT_TIMEOUT_S},
            )
        # With isolation_level None, the driver begins no transactions; _begin_sqlite begins all of them.
        engine = create_engine(
            url.url,
            pool_size=POOL_SIZE,
            max_overflow=0,
            connect_args={"isolation_level": None, "timeout": BUSY_TIMEOUT_S},
        )
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        _switch_to_wal(engine)
        return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA foreign_keys=ON")
    # With WAL, a kill loses no commit. A power cut may lose the last commits, but does not damage the file.
    connection.execute("PRAGMA synchronous=NORMAL")


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE waits for the write lock. A transaction that takes a read lock first, and then needs the write lock,
    # would fail at once instead.
    writes = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _switch_to_wal(engine: Engine) -> None:
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        raw = engine.raw_connection()
        try:
            # The switch to WAL needs exclusive access to the file, and does not always wait until others close it.
            raw.cursor().execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        finally:
            raw.close()


@contextmanager
def reading(engine: Engine, url: LedgerUrl) -> Iterator[Connection]:
    """Open a transaction that only reads."""
    with explained(url), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def writing(engine: Engine, url: LedgerUrl, lock: str, *, bounded: bool = True) -> Iterator[Connection]:
    """Open a transaction that writes. No other writer with the same lock name runs at the same time.

    SQLite has only one writer at a time; PostgreSQL uses an advisory lock that ends with the transaction. So a writer
    may read a row and then write values that depend on it.

    With ``bounded``, PostgreSQL ends a statement that takes too long, and a transaction whose writer is frozen. That
    frees the lock. These limits hold for this transaction only, and also work through a connection pooler.
    """
    with explained(url), engine.connect().execution_options(**{_WRITE: True}) as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            if bounded:
                connection.execute(text(_BOUNDS), {"busy": _ms(BUSY_TIMEOUT_S), "frozen": _ms(2 * BUSY_TIMEOUT_S)})
            connection.execute(
                text("SELECT pg_advisory_xact_lock(:class, hashtext(:name))"), {"class": _LOCK_CLASS, "name": lock}
            )
        yield connection


def _ms(seconds: float) -> str:
    return str(int(seconds * 1000))


@contextmanager
def explained(url: LedgerUrl) -> Iterator[None]:
    """Turn a database error into a LedgerError that says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise LedgerError(
            f"the ledger {url} needs {error.name}, which is not installed: pip install 'everstep[postgresql]'"
        ) from error
    except NoSuchModuleError as error:
        raise LedgerError(f"the ledger {url} cannot be opened: {error}") from error
    except (SQLAlchemyError, sqlite3.Error) as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise LedgerError(f"the ledger {url}: {reason}; {_advice(reason)}") from error


DAMAGED = (
    "the file is damaged: move it away (workers make a new ledger at once), or stop the workers and put a backup in "
    "its place, without the files -wal and -shm"
)
_ADVICE = (
    (("malformed", "not a database"), DAMAGED),
    (("unable to open", "readonly", "permission"), "check that the folder exists and may be written"),
    (
        ("locked", "lock timeout"),
        "another process has locked it: try again, or find the process that has the file open",
    ),
    (("full",), "free some disk space"),
    (
        ("refused", "timeout", "resolve", "closed the connection"),
        "check that PostgreSQL runs and that the URL is right",
    ),
    (("authentication", "role"), "check user and password in the URL"),
    (("database",), "check the database's name, or create it with createdb"),
)


def _advice(reason: str) -> str:
    for words, advice in _ADVICE:
        if any(word in reason.lower() for word in words):
            return advice
    return "look at the database's own log"
