"""SQL statements of the ledger; each function runs in a transaction of its caller."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError
from sqlalchemy import Connection, RowMapping, ScalarSelect, Select, func, select
from sqlalchemy.dialects import postgresql, sqlite

from activities.ledger.records import (
    IncidentEventRecord,
    IncidentRecord,
)
from activities.ledger.tables import (
    CodeVersions,
    Generations,
    IncidentDocuments,
    Incidents,
    Intervals,
    Jobs,
    LedgerTable,
)
from everstep.decisions.training_time.ettr import Interval, Launch, Outage, unproductive
from everstep.errors import LedgerError
from everstep.model.job_state import incident_workflow_id
from everstep.model.stage import Stage
from everstep.model.version import JobVersion

Document = Literal["anomaly", "evidence", "report"]
"""A large part of an incident, which is read only where it is needed."""
DOCUMENTS: tuple[Document, ...] = get_args(Document)
_INCIDENT_ID = re.compile(r"incident/(?P<job>[^/]+)/(?P<number>[0-9]+)")


def incident_parts(id: str) -> tuple[str, int]:
    """Return the job and the number in an incident's id.

    Raises:
        LedgerError: the id does not have the form ``incident/<job>/<number>``.
    """
    match = _INCIDENT_ID.fullmatch(id)
    if match is None:
        raise LedgerError(f"{id!r} is not the id of an incident, which looks like incident/gpt/0001")
    return match["job"], int(match["number"])


def insert(connection: Connection, table: type[LedgerTable]) -> postgresql.Insert | sqlite.Insert:
    """Return an insert that allows ``on_conflict_do_update``."""
    return (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(table)


def fill(connection: Connection, table: type[LedgerTable], key: Mapping[str, Any], learned: Mapping[str, Any]) -> None:
    """Insert a row, or fill its columns that are NULL."""
    statement = insert(connection, table).values({**key, **learned})
    kept = {name: func.coalesce(getattr(table, name), statement.excluded[name]) for name in learned}
    connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=kept))


def fill_latest(
    connection: Connection, table: type[CodeVersions], key: Mapping[str, Any], row: Mapping[str, Any]
) -> None:
    """Insert a row, or replace the stored row unless it was seen later than the new one."""
    statement = insert(connection, table).values({**key, **row})
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=list(key),
            set_={name: statement.excluded[name] for name in row},
            where=table.seen_ns <= statement.excluded.seen_ns,
        )
    )


def version_row(version: JobVersion, seen_ns: int) -> dict[str, Any]:
    """Return the row of a version."""
    return {
        "id": version.runs.id if version.runs else "",
        "status": str(version.status),
        "operator": clean(version.wanted.operator),
        "reason": clean(version.wanted.reason),
        "asked_ns": version.asked_ns,
        "changed": clean(version.changed),
        "ended": clean(version.ended),
        "version": as_json(version),
        "seen_ns": seen_ns,
    }


def version_query() -> Select[Any]:
    """Return a query for all versions of jobs' code, with their runs."""
    run = (Jobs.name.label("job"), Jobs.started_ns, Jobs.ended_ns, Jobs.outcome)
    return select(*run, CodeVersions.__table__).join_from(CodeVersions, Jobs, CodeVersions.run == Jobs.run)


def newest_run(job: str, by_ns: int | None = None) -> ScalarSelect[int]:
    """Return a query for a job's newest run, or for its newest run that had started by a time."""
    ours = Jobs.name == job if by_ns is None else (Jobs.name == job) & (Jobs.started_ns <= by_ns)
    query = select(Jobs.run).where(ours).order_by(Jobs.started_ns.desc(), Jobs.run.desc()).limit(1)
    return query.scalar_subquery()


def this_run(run: int) -> ScalarSelect[int]:
    """Return a query for the run with a number."""
    return select(Jobs.run).where(Jobs.run == run).scalar_subquery()


def run_to_write(connection: Connection, job: str, by_ns: int | None = None) -> int:
    """Return the newest run of a job; with ``by_ns``, the newest run that had begun by that time. If there is none,
    insert a row for it."""
    run = connection.scalar(select(newest_run(job, by_ns)))
    if run is None:
        # The start of the job was not written yet; job_started fills this row later.
        fill(connection, Jobs, {"name": job, "started_ns": 0}, {"outcome": None})
        run = connection.scalars(select(newest_run(job, by_ns))).one()
    return int(run)


def fill_incident(connection: Connection, id: str, learned: Mapping[str, Any]) -> dict[str, Any]:
    """Insert an incident's row and its documents, or fill their columns that are NULL; returns the key of the rows."""
    job, number = incident_parts(id)
    key = {"run": run_to_write(connection, job), "number": number}
    columns = {name: value for name, value in learned.items() if name not in DOCUMENTS}
    fill(connection, Incidents, key, {"id": incident_workflow_id(job, number), **columns})
    if documents := {str(name): value for name, value in learned.items() if name in DOCUMENTS}:
        fill(connection, IncidentDocuments, key, documents)
    return key


def incident_query(documents: Iterable[Document]) -> Select[Any]:
    """Return a query for all incidents, with the names of their jobs and some documents."""
    columns = [getattr(IncidentDocuments, name) for name in documents]
    query = select(Jobs.name.label("job"), Incidents.__table__, *columns)
    query = query.join_from(Incidents, Jobs, Incidents.run == Jobs.run)
    if columns:
        ours = (IncidentDocuments.run == Incidents.run) & (IncidentDocuments.number == Incidents.number)
        query = query.outerjoin(IncidentDocuments, ours)
    return query


def incident_record(row: RowMapping, events: Iterable[IncidentEventRecord] = ()) -> IncidentRecord:
    """Return an incident as an answer of the ledger."""
    fields = {**row, "evicted": row["evicted"] or [], "events": list(events)}
    try:
        return IncidentRecord.model_validate(fields)
    except ValidationError as error:
        # One unreadable row must not make a list of incidents unreadable.
        bad = {str(problem["loc"][0]) for problem in error.errors()}
        kept = {name: value for name, value in fields.items() if name not in bad}
        return IncidentRecord.model_validate(
            {**kept, "problem": f"this release cannot read its {', '.join(sorted(bad))}"}
        )


def intervals(connection: Connection, run: ScalarSelect[int]) -> list[Interval]:
    """Return the intervals of a run in the order of time: noted intervals, and those computed from its launches and
    incidents."""
    noted = connection.execute(select(Intervals.__table__).where(Intervals.run == run))
    spans = [Interval(row.start_ns, row.end_ns, row.kind, row.cause or "") for row in noted]
    generations = connection.execute(select(Generations.__table__).where(Generations.run == run))
    launches = [Launch(row.launched_ns, row.stepped_ns) for row in generations if row.launched_ns is not None]
    columns = Incidents.id, Incidents.seen_ns, Incidents.opened_ns, Incidents.closed_ns, Incidents.resolution
    incidents = connection.execute(select(*columns, Incidents.quiet_s).where(Incidents.run == run))
    outages = [
        Outage(row.id, seen_ns - int((row.quiet_s or 0.0) * 1e9), row.closed_ns)
        for row in incidents
        if (seen_ns := row.seen_ns or row.opened_ns) is not None and row.resolution != Stage.OBSERVED
    ]
    if started_ns := connection.scalar(select(Jobs.started_ns).where(Jobs.run == run)):
        spans += unproductive(started_ns, launches, outages)
    return sorted(spans, key=lambda interval: interval.start_ns)


def gaps(connection: Connection, run: ScalarSelect[int], *, finished: bool) -> list[str]:
    """Return the reasons why the productive time is not fully known, as texts."""
    stepped = connection.scalar(select(func.count(Generations.stepped_ns)).where(Generations.run == run))
    redone = connection.scalar(
        select(func.count()).where(
            Incidents.run == run, Incidents.closed_ns.is_not(None), Incidents.lost_steps.is_(None)
        )
    )
    return [
        *(["no step of the job was seen"] if finished and not stepped else []),
        *(["how many steps were done again"] if redone else []),
    ]


def as_json(model: BaseModel) -> dict[str, Any]:
    """Return JSON that PostgreSQL accepts: NaN and infinity become null."""
    fields: dict[str, Any] = json.loads(model.model_dump_json())
    return fields


def clean(value: Any) -> Any:
    """Return a text that a database accepts: the output of ranks may have NUL bytes and invalid characters."""
    if not isinstance(value, str):
        return value
    return value.replace("\x00", "�").encode("utf-8", "replace").decode()
