"""The ledger's methods.

Writes are idempotent by natural key and fill a column once: an activity may
run twice, its attempts may overlap, and a row whose beginning was lost (the
ledger was away) is made from what arrives later.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy import Connection, Engine, RowMapping, ScalarSelect, Select, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from activities.ledger.database import POOL_SIZE, LedgerUrl, connect, reading, writing
from activities.ledger.migrate import migrate
from activities.ledger.records import (
    GenerationRecord,
    IncidentEventRecord,
    IncidentRecord,
    LedgerJob,
    MachineEventRecord,
    NumbersUsed,
)
from activities.ledger.tables import (
    Generations,
    IncidentEvents,
    Incidents,
    Intervals,
    Jobs,
    LedgerTable,
    MachineEvents,
)
from everstep import private
from everstep.decisions.ettr import Ettr, Interval, Kind, Launch, Outage, ettr, unproductive
from everstep.errors import LedgerError
from everstep.model.incident import Anomaly, Evidence, IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import incident_workflow_id

P = ParamSpec("P")
T = TypeVar("T")

_INCIDENT_ID = re.compile(r"incident/(?P<job>[^/]+)/(?P<number>[0-9]+)")
_CHUNK = 500  # rows per statement: SQLite takes 32,766 parameters


class Ledger:
    """An open ledger; thread-safe.

    Every method raises LedgerError when the database cannot be reached.
    """

    def __init__(self, engine: Engine, url: LedgerUrl) -> None:
        self.url = url
        self._engine = engine
        self._threads = ThreadPoolExecutor(POOL_SIZE, thread_name_prefix="ledger")

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> Ledger:
        """Open a ledger and bring its tables up to date.

        Args:
            url: ``sqlite:////absolute/path/ledger.db`` or ``postgresql+psycopg://user@host/database``.
            create: make a SQLite file that does not exist; commands that only read say False.

        Raises:
            LedgerError: the ledger cannot be reached, is damaged, or is newer than this release.
        """
        where = LedgerUrl(url)
        if where.file is not None and not where.file.exists():
            if not create:
                raise LedgerError(f"there is no ledger at {where.file}: run a job first, or name another with --ledger")
            try:
                where.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(private.open_file(where.file, os.O_RDWR | os.O_CREAT))  # what SQLite puts beside it is like it
            except OSError as error:
                raise LedgerError(f"the ledger {where.file} cannot be made: {error}") from error
        engine = connect(where)
        try:
            migrate(engine, where)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, where)

    def close(self) -> None:
        """Wait for the calls that run and close the connections."""
        self._threads.shutdown()
        self._engine.dispose()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def call(self, method: Callable[Concatenate[Ledger, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method in the ledger's threads: ``await ledger.call(Ledger.jobs)``.

        Cancelling the await does not stop the call; it is idempotent.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: method(self, *args, **kwargs))

    # Writes.

    def job_started(self, spec: JobSpec, *, started_ns: int) -> NumbersUsed:
        """Open a run of a job; to be awaited before any other row of the run is written.

        Returns:
            The numbers that earlier runs of this name used: count on from them.
        """
        with self._writing(spec.name) as connection:
            stub = (Jobs.name == spec.name) & (Jobs.started_ns == 0)
            known = connection.scalar(select(Jobs.run).where(Jobs.name == spec.name, Jobs.started_ns == started_ns))
            if known is None:
                connection.execute(update(Jobs).where(stub).values(started_ns=started_ns))
            key = {"name": spec.name, "started_ns": started_ns}
            _fill(connection, Jobs, key, {"spec": _json(spec.shown())})
            run = connection.scalar(select(Jobs.run).filter_by(**key))
            earlier = select(Jobs.run).where(Jobs.name == spec.name, Jobs.run != run)
            return NumbersUsed(
                incidents=connection.scalar(select(func.max(Incidents.number)).where(Incidents.run.in_(earlier))) or 0,
                generations=connection.scalar(
                    select(func.max(Generations.generation)).where(Generations.run.in_(earlier))
                )
                or 0,
            )

    def job_ended(self, job: str, *, ended_ns: int, outcome: str) -> None:
        """Close the newest run of a job that had begun by then: an attempt that comes late closes no later run."""
        with self._writing(job) as connection:
            run = _run_to_write(connection, job, by_ns=ended_ns)
            connection.execute(
                update(Jobs)
                .where(Jobs.run == run, Jobs.ended_ns.is_(None))
                .values(ended_ns=ended_ns, outcome=_clean(outcome))
            )

    def generation_launched(
        self, job: str, generation: int, *, resume_step: int, launched_ns: int, forked_ns: int = 0, reason: str = ""
    ) -> None:
        """Note that a generation was started; ``forked_ns`` 0 where it is not known."""
        learned = {
            "resume_step": resume_step,
            "launched_ns": launched_ns,
            "forked_ns": forked_ns or None,
            "reason": _clean(reason),
        }
        self._generation(job, generation, learned)

    def generation_stepped(self, job: str, generation: int, *, stepped_ns: int) -> None:
        """Note when all ranks of a generation had stepped (or counted as alive, where steps do not show)."""
        self._generation(job, generation, {"stepped_ns": stepped_ns or None})

    def _generation(self, job: str, generation: int, learned: dict[str, Any]) -> None:
        with self._writing(job) as connection:
            _fill(connection, Generations, {"run": _run_to_write(connection, job), "generation": generation}, learned)

    def incident_opened(self, id: str, anomaly: Anomaly, *, opened_ns: int) -> None:
        """Note a new incident; ``id`` is its workflow's, ``incident/<job>/<number>``."""
        learned = {
            "correlation_id": anomaly.id,
            "symptom": str(anomaly.symptom),
            "headline": _clean(anomaly.headline),
            "anomaly": _json(anomaly),
            "seen_ns": anomaly.seen_ns or None,
            "opened_ns": opened_ns,
        }
        self._incident(id, learned)

    def incident_evidence(self, id: str, evidence: Evidence) -> None:
        """Keep what the machines knew once the job was stopped; the first evidence of an incident stays."""
        self._incident(id, {"evidence": _json(evidence)})

    def incident_event(self, id: str, position: int, *, time_ns: int, stage: str, text: str) -> None:
        """Note one thing that was seen, decided or done; positions order the story and start at 1."""
        row = {"time_ns": time_ns, "stage": _clean(stage), "text": _clean(text)}
        with self._writing(incident_parts(id)[0]) as connection:
            key = _fill_incident(connection, id, {})
            _fill(connection, IncidentEvents, key | {"position": position}, row)

    def incident_closed(self, id: str, report: IncidentReport, *, closed_ns: int) -> None:
        """Close an incident with its report; what it was in the end replaces the symptom that was seen first."""
        learned = {
            "closed_ns": closed_ns,
            "resolution": _clean(report.resolution),
            "cause": _clean(report.cause),
            "step": report.step,
            "lost_steps": report.lost_steps,
            "seconds": report.seconds,
            "evicted": report.evicted,
            "recovered": report.recovered and report.confirmed,
            "report": _json(report),
        }
        with self._writing(incident_parts(id)[0]) as connection:
            key = _fill_incident(connection, id, learned)
            if report.failures:  # what a watcher saw first was perhaps a consequence only
                row = (Incidents.run == key["run"]) & (Incidents.number == key["number"])
                connection.execute(update(Incidents).where(row).values(symptom=str(report.failures[0].symptom)))

    def _incident(self, id: str, learned: dict[str, Any]) -> None:
        with self._writing(incident_parts(id)[0]) as connection:
            _fill_incident(connection, id, learned)

    def machine_event(self, event: MachineEventRecord) -> None:
        """Keep one observation of an agent."""
        self.machine_events_seen([event])

    def machine_events_seen(self, events: Sequence[MachineEventRecord]) -> None:
        """Keep many observations, in one transaction."""
        rows = [{name: _clean(value) for name, value in event.model_dump().items()} for event in events]
        with self._writing("machine events") as connection:
            for start in range(0, len(rows), _CHUNK):
                chunk = rows[start : start + _CHUNK]
                connection.execute(_insert(connection, MachineEvents).values(chunk).on_conflict_do_nothing())

    def interval(self, job: str, *, start_ns: int, end_ns: int | None, kind: Kind, cause: str = "") -> None:
        """Note how a run spent its time.

        Job, kind and start are the key: call again with the same three to give
        an interval that is going on (``end_ns`` None) its end.
        """
        with self._writing(job) as connection:
            key = {"run": _run_to_write(connection, job), "kind": kind, "start_ns": start_ns}
            _fill(connection, Intervals, key, {"end_ns": end_ns, "cause": _clean(cause) or None})

    # Reads.

    def jobs(self) -> list[LedgerJob]:
        """All runs of all jobs, newest first."""
        with self._reading() as connection:
            rows = connection.execute(select(Jobs.__table__).order_by(Jobs.started_ns.desc(), Jobs.run.desc()))
            return [LedgerJob.model_validate(row) for row in rows]

    def generations(self, job: str) -> list[GenerationRecord]:
        """The launches of a job's newest run, in order."""
        with self._reading() as connection:
            rows = connection.execute(
                select(Generations.__table__)
                .where(Generations.run == _newest_run(job))
                .order_by(Generations.generation)
            )
            return [GenerationRecord.model_validate(row) for row in rows]

    def incidents(self, job: str | None = None, *, limit: int | None = None) -> list[IncidentRecord]:
        """Incidents of all runs, newest first, without their events."""
        query = _incident_query().order_by(
            func.coalesce(Incidents.opened_ns, Incidents.closed_ns, 0).desc(),
            Incidents.run.desc(),
            Incidents.number.desc(),
        )
        if job is not None:
            query = query.where(Jobs.name == job)
        with self._reading() as connection:
            return [_incident_record(row) for row in connection.execute(query.limit(limit)).mappings()]

    def incident(self, id: str) -> IncidentRecord | None:
        """An incident with its events; where a number was used twice, the newest."""
        with self._reading() as connection:
            query = _incident_query().where(Incidents.id == id).order_by(Incidents.run.desc()).limit(1)
            row = connection.execute(query).mappings().first()
            if row is None:
                return None
            events = connection.execute(
                select(IncidentEvents.__table__)
                .where(IncidentEvents.run == row["run"], IncidentEvents.number == row["number"])
                .order_by(IncidentEvents.position)
            )
            return _incident_record(row, [IncidentEventRecord.model_validate(event) for event in events])

    def machine_events(self, job: str | None = None, *, limit: int | None = None) -> list[MachineEventRecord]:
        """Observations of the agents, oldest first; with a limit the newest of them."""
        query = select(MachineEvents.__table__).order_by(MachineEvents.time_ns.desc(), MachineEvents.observation.desc())
        if job is not None:
            query = query.where(MachineEvents.job == job)
        with self._reading() as connection:
            rows = connection.execute(query.limit(limit)).all()
        return [MachineEventRecord.model_validate(row) for row in reversed(rows)]

    def intervals(self, job: str) -> list[Interval]:
        """How the newest run of a job spent its time: what was noted, and what launches and incidents tell."""
        with self._reading() as connection:
            return _intervals(connection, _newest_run(job))

    def ettr(
        self, job: str, *, now_ns: int, window_s: float | None = None, quiet_since_ns: int | None = None
    ) -> Ettr | None:
        """Effective training time ratio of the newest run, up to its end or now; None: no such job, or no start.

        Args:
            job: Its name.
            now_ns: The present.
            window_s: Length of a sliding window up to now; None: since the start.
            quiet_since_ns: No rank of it has stepped since, as its agents say; None: they step, or nobody knows.
        """
        with self._reading() as connection:
            found = connection.execute(
                select(Jobs.started_ns, Jobs.ended_ns, Jobs.outcome).where(Jobs.run == _newest_run(job))
            ).first()
            if found is None or not found.started_ns:
                return None
            end_ns = now_ns if found.ended_ns is None else min(now_ns, found.ended_ns)
            spans = _intervals(connection, _newest_run(job))
            unknown = _unknown(connection, _newest_run(job), finished=(found.outcome or "").startswith("finished"))
        if quiet_since_ns is not None and found.ended_ns is None:
            spans = [*spans, Interval(quiet_since_ns, None, "recovery", "no rank steps")]
        return ettr(spans, start_ns=found.started_ns, now_ns=end_ns, window_s=window_s, unknown=unknown)

    def _reading(self) -> AbstractContextManager[Connection]:
        return reading(self._engine, self.url)

    def _writing(self, lock: str) -> AbstractContextManager[Connection]:
        return writing(self._engine, self.url, lock)


def incident_parts(id: str) -> tuple[str, int]:
    """Job and number of an incident's id.

    Raises:
        LedgerError: it is not of the form ``incident/<job>/<number>``.
    """
    found = _INCIDENT_ID.fullmatch(id)
    if found is None:
        raise LedgerError(f"{id!r} is not the id of an incident: they look like incident/gpt/0001")
    return found["job"], int(found["number"])


def _insert(connection: Connection, table: type[LedgerTable]) -> postgresql.Insert | sqlite.Insert:
    return (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(table)


def _fill(connection: Connection, table: type[LedgerTable], key: Mapping[str, Any], learned: Mapping[str, Any]) -> None:
    """Insert a row, or fill those of its columns that are still NULL."""
    statement = _insert(connection, table).values({**key, **learned})
    kept = {name: func.coalesce(getattr(table, name), statement.excluded[name]) for name in learned}
    connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=kept))


def _newest_run(job: str, by_ns: int | None = None) -> ScalarSelect[int]:
    ours = Jobs.name == job if by_ns is None else (Jobs.name == job) & (Jobs.started_ns <= by_ns)
    query = select(Jobs.run).where(ours).order_by(Jobs.started_ns.desc(), Jobs.run.desc()).limit(1)
    return query.scalar_subquery()


def _run_to_write(connection: Connection, job: str, by_ns: int | None = None) -> int:
    """The newest run of a job; ``by_ns``: of those that had begun by then."""
    found = connection.scalar(select(_newest_run(job, by_ns)))
    if found is None:
        # The row of the start did not arrive (yet): job_started takes this one over.
        _fill(connection, Jobs, {"name": job, "started_ns": 0}, {"outcome": None})
        found = connection.scalars(select(_newest_run(job, by_ns))).one()
    return int(found)


def _fill_incident(connection: Connection, id: str, learned: Mapping[str, Any]) -> dict[str, Any]:
    job, number = incident_parts(id)
    key = {"run": _run_to_write(connection, job), "number": number}
    _fill(connection, Incidents, key, {"id": incident_workflow_id(job, number), **learned})
    return key


def _incident_query() -> Select[Any]:
    return select(Jobs.name.label("job"), Incidents.__table__).join_from(Incidents, Jobs, Incidents.run == Jobs.run)


def _incident_record(row: RowMapping, events: Iterable[IncidentEventRecord] = ()) -> IncidentRecord:
    found = {**row, "evicted": row["evicted"] or [], "events": list(events)}
    try:
        return IncidentRecord.model_validate(found)
    except ValidationError as error:
        # One row harms one line of a list.
        bad = {str(one["loc"][0]) for one in error.errors()}
        kept = {name: value for name, value in found.items() if name not in bad}
        return IncidentRecord.model_validate(
            {**kept, "problem": f"this release cannot read its {', '.join(sorted(bad))}"}
        )


def _intervals(connection: Connection, run: ScalarSelect[int]) -> list[Interval]:
    noted = connection.execute(select(Intervals.__table__).where(Intervals.run == run))
    found = [Interval(row.start_ns, row.end_ns, row.kind, row.cause or "") for row in noted]
    generations = connection.execute(select(Generations.__table__).where(Generations.run == run))
    launches = [Launch(row.launched_ns, row.stepped_ns) for row in generations if row.launched_ns is not None]
    incidents = connection.execute(select(Incidents.__table__).where(Incidents.run == run))
    outages = [
        Outage(row.id, seen_ns - _quiet_ns(row.anomaly), row.closed_ns)
        for row in incidents
        if (seen_ns := row.seen_ns or row.opened_ns) is not None
    ]
    if started_ns := connection.scalar(select(Jobs.started_ns).where(Jobs.run == run)):
        found += unproductive(started_ns, launches, outages)
    return sorted(found, key=lambda interval: interval.start_ns)


def _quiet_ns(anomaly: Mapping[str, Any] | None) -> int:
    """How long before it was seen an anomaly had stopped the job; 0: nobody knows better."""
    quiet_s = (anomaly or {}).get("quiet_s") or 0.0
    return int(quiet_s * 1e9) if isinstance(quiet_s, int | float) else 0


def _unknown(connection: Connection, run: ScalarSelect[int], *, finished: bool) -> list[str]:
    """What may have cost a run productive time and was never noted."""
    stepped = connection.scalar(select(func.count(Generations.stepped_ns)).where(Generations.run == run))
    redone = connection.scalar(
        select(func.count()).where(
            Incidents.run == run, Incidents.closed_ns.is_not(None), Incidents.lost_steps.is_(None)
        )
    )
    return [
        *(["no step of it was seen"] if finished and not stepped else []),
        *(["how many steps were done again"] if redone else []),
    ]


def _json(model: BaseModel) -> dict[str, Any]:
    """As JSON that PostgreSQL takes: NaN and infinity become null."""
    found: dict[str, Any] = json.loads(model.model_dump_json())
    return found


def _clean(value: Any) -> Any:
    """Text that a database takes: output of ranks may hold NUL bytes and broken characters."""
    if not isinstance(value, str):
        return value
    return value.replace("\x00", "�").encode("utf-8", "replace").decode()
