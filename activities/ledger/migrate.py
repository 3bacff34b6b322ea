"""Migrates a ledger's tables to this release.

A ledger of a newer release is used without changes if the newer release only added to the tables. So workers can be
upgraded one after the other: a worker of the earlier release can still use the ledger.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text

from activities.ledger.database import LedgerUrl, reading, writing
from activities.ledger.tables import LedgerTable
from everstep.errors import LedgerError

if TYPE_CHECKING:  # most ledgers are up to date and need no alembic, which is slow to import
    from alembic.config import Config

HEAD = "0001"
"""The newest revision in ``migrations/versions``."""
VERSION_TABLE = "everstep_ledger_version"
"""The name of the table with the revision. Alembic's default name is not used, because a PostgreSQL database may also
hold tables of other programs."""

_ALEMBIC = threading.Lock()  # alembic keeps its context in module globals


def migrate(engine: Engine, url: LedgerUrl, to: str = "head") -> None:
    """Upgrade to a revision, in one transaction that holds a lock.

    If two workers start at the same time, the second waits for the first and then has nothing to do. A kill in the
    middle does not change the ledger.

    Raises:
        LedgerError: the database is damaged, is not a ledger, or was changed by a newer release in such a way that this
            release cannot use it.
    """
    with reading(engine, url) as connection:
        revision = _revision(connection)
        if to == "head" and revision == HEAD:
            return
        config = configuration()
        if to == "head" and _is_newer(revision, config) and not _lacking(connection):
            return
    from alembic import command

    # There is no time limit, because it may take long to rewrite a table with the data of years. Other workers wait.
    with _ALEMBIC, writing(engine, url, "migrate", bounded=False) as connection:
        # This is checked under the lock, because another worker may have migrated the ledger before.
        _check_revision(connection, url, config)
        config.attributes["connection"] = connection
        command.upgrade(config, to)


def configuration() -> Config:
    """Return alembic's configuration, which needs no file."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return revision


def _check_revision(connection: Connection, url: LedgerUrl, config: Config) -> None:
    current = _revision(connection)
    if current is None:
        foreign = sorted(set(inspect(connection).get_table_names()) & set(LedgerTable.metadata.tables))
        if foreign:
            raise LedgerError(
                f"{url} is not a ledger, but has tables named {', '.join(foreign)}: use a database of its own"
            )
    elif _is_newer(current, config):
        raise LedgerError(
            f"the ledger {url} is at revision {current}, which this release does not know (the newest that "
            f"it knows is {HEAD}): a newer everstep wrote it; upgrade everstep or use another ledger "
            f"({_lacking(connection)})"
        )


def _is_newer(revision: str | None, config: Config) -> bool:
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    return revision is not None and revision not in known


def _lacking(connection: Connection) -> str:
    """Return why this release cannot use the tables as they are; empty: it can."""
    inspector = inspect(connection)
    there = set(inspector.get_table_names())
    for name, table in LedgerTable.metadata.tables.items():
        if name not in there:
            return f"it has no table {name}"
        columns = {column["name"]: column for column in inspector.get_columns(name)}
        if missing := sorted({column.name for column in table.columns} - columns.keys()):
            return f"its table {name} has no column {missing[0]}"
        for column in columns.values():
            ours, optional = column["name"] in table.columns, column["nullable"] or column["default"] is not None
            if not ours and not optional:
                return f"its table {name} requires a value for {column['name']}"
    return ""
