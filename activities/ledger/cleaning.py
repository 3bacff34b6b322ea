"""Keeps the ledger small: the details of old incidents, and old machine events, are deleted.

Details are an incident's documents, events and samples. Its row stays, because the ETTR of a run is computed from it.
An open incident keeps everything.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from pydantic import BaseModel
from sqlalchemy import Connection, delete, func, select, tuple_, update

from activities.ledger.ledger import Ledger
from activities.ledger.statements import insert
from activities.ledger.tables import (
    Cleanings,
    IncidentDocuments,
    IncidentEvents,
    IncidentLooks,
    Incidents,
    MachineEvents,
)
from everstep.base.log_once import LoggedErrors
from everstep.model.retention import Retention

EVERY_S = 3600.0
"""The time between two cleanings, seconds."""
PAUSE_S = 0.1
"""The time in which others can write between two parts of a cleaning, seconds."""
INCIDENTS_AT_ONCE = 20
"""The largest number of incidents in one transaction."""
EVENTS_AT_ONCE = 2000
"""The largest number of machine events in one transaction."""
DAY_NS = 86_400 * 10**9
LEAST_NS = DAY_NS
"""Even in a ledger that is too large, an incident keeps its details for this long after its end, nanoseconds, because
late entries of it may still arrive. Machine events are kept for the same time."""

log = structlog.get_logger("ledger")


async def keep_clean(ledger: Ledger, retention: Retention) -> None:
    """Clean the ledger every hour, until cancelled.

    A cleaning consists of short transactions, each of which also counts what it deletes. So it may be interrupted
    anywhere, and several workers may clean at the same time.
    """
    troubles = LoggedErrors()
    while True:
        more = 0
        try:
            more = await ledger.call(clean_part, retention, now_ns=time.time_ns())
        except Exception as error:  # an error of the ledger must not end the worker
            if troubles.is_new("cleaning", error):
                log.warning("the ledger cannot be cleaned; it is tried again every hour", error=str(error))
        else:
            troubles.recovered("cleaning")
        await asyncio.sleep(PAUSE_S if more else EVERY_S)


def clean_part(ledger: Ledger, retention: Retention, *, now_ns: int) -> int:
    """Delete the details of some incidents and some machine events: the oldest ones, in one transaction.

    Returns:
        The number of incidents and machine events; 0: there is nothing to clean.

    Raises:
        LedgerError: the database is unreachable or damaged.
    """
    with ledger.writing("clean") as connection:
        too_large = used_bytes(connection) > retention.gib * 2**30 if ledger.url.file else False
        before_ns = now_ns - (LEAST_NS if too_large else round(retention.days * DAY_NS))
        keys = connection.execute(
            select(Incidents.run, Incidents.number)
            .where(Incidents.closed_ns < before_ns, Incidents.cleaned_ns.is_(None))
            .order_by(Incidents.closed_ns)
            .limit(INCIDENTS_AT_ONCE)
        ).all()
        samples = 0
        for run, number in keys:
            for table in (IncidentDocuments, IncidentEvents, IncidentLooks):
                gone = connection.execute(delete(table).where(table.run == run, table.number == number)).rowcount
                samples += gone if table is IncidentLooks else 0
            ours = (Incidents.run == run) & (Incidents.number == number)
            connection.execute(update(Incidents).where(ours).values(cleaned_ns=now_ns))
        key = MachineEvents.time_ns, MachineEvents.observation
        old = select(*key).where(MachineEvents.time_ns < before_ns).order_by(*key).limit(EVENTS_AT_ONCE)
        events = connection.execute(delete(MachineEvents).where(tuple_(*key).in_(old))).rowcount
        for what, removed in (("incidents", len(keys)), ("samples", samples), ("machine events", events)):
            if removed:
                _count(connection, what, removed, now_ns)
    return len(keys) + events


def _count(connection: Connection, what: str, removed: int, now_ns: int) -> None:
    statement = insert(connection, Cleanings).values(what=what, removed=removed, last_ns=now_ns)
    more = {"removed": Cleanings.removed + statement.excluded.removed, "last_ns": statement.excluded.last_ns}
    connection.execute(statement.on_conflict_do_update(index_elements=["what"], set_=more))


def used_bytes(connection: Connection) -> int:
    """Return the size of a ledger in SQLite, without the pages that are free; in PostgreSQL, that of the database."""
    if connection.dialect.name == "postgresql":
        return int(connection.scalar(select(func.pg_database_size(func.current_database()))) or 0)
    pages, free, size = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


class LedgerSize(BaseModel):
    """The size of a ledger, and the numbers of what the cleaning deleted."""

    bytes: int
    incidents: int
    cleaned: dict[str, int]
    """``incidents``, ``samples`` or ``machine events`` → the number of those that were cleaned."""
    last_ns: int = 0
    """The time of the last cleaning, nanoseconds; 0: nothing was cleaned."""

    def line(self) -> str:
        """Return the numbers as a text."""
        text = f"{self.incidents:,} incidents, {self.bytes / 2**20:,.0f} MiB"
        if not self.cleaned:
            return f"{text}, nothing was cleaned"
        removed = ", ".join(f"{number:,} {what}" for what, number in sorted(self.cleaned.items()))
        day = time.strftime("%Y-%m-%d", time.localtime(self.last_ns / 1e9))
        return f"{text}; cleaned until now: {removed}, the last on {day}"


def ledger_size(ledger: Ledger) -> LedgerSize:
    """Return the size of a ledger, and what was cleaned.

    Raises:
        LedgerError: the database is unreachable or damaged.
    """
    with ledger.reading() as connection:
        rows = connection.execute(select(Cleanings.what, Cleanings.removed, Cleanings.last_ns)).all()
        return LedgerSize(
            bytes=used_bytes(connection),
            incidents=connection.scalar(select(func.count()).select_from(Incidents)) or 0,
            cleaned={what: removed for what, removed, _ in rows},
            last_ns=max((last_ns for _, _, last_ns in rows), default=0),
        )
