"""Alembic's entry point. The ledger passes its connection; a developer passes ``-x url=sqlite:///…`` instead.

alembic -c activities/ledger/migrations/alembic.ini -x url=sqlite:////tmp/l.db upgrade head
alembic -c activities/ledger/migrations/alembic.ini -x url=sqlite:////tmp/l.db revision --autogenerate -m "…"
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from activities.ledger.database import LedgerUrl, connect, writing
from activities.ledger.migrate import VERSION_TABLE
from activities.ledger.tables import LedgerTable


def run(connection: Connection) -> None:
    """Run the migrations inside the caller's transaction."""
    context.configure(
        connection=connection,
        target_metadata=LedgerTable.metadata,
        version_table=VERSION_TABLE,
        # SQLite can roll back DDL too, if the transaction begins here and not in the driver.
        transactional_ddl=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    context.run_migrations()


connection = context.config.attributes.get("connection")
if connection is not None:
    run(connection)
else:
    url = LedgerUrl(context.get_x_argument(as_dictionary=True)["url"])
    with writing(connect(url), url, "migrate") as own:
        run(own)
