"""The ledger's methods.

Writes are idempotent: a row has a natural key, and each of its columns is filled only once. This is needed because an
activity may run twice and its attempts may overlap. If the first write of a row was lost because the ledger was
unreachable, a later write inserts the row.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, func, select, update

from activities.ledger.database import DAMAGED, POOL_SIZE, LedgerUrl, connect, reading, writing
from activities.ledger.migrate import migrate
from activities.ledger.records import (
    CodeVersionRecord,
    GenerationRecord,
    IncidentEventRecord,
    IncidentRecord,
    LedgerJob,
    MachineEventRecord,
    NumbersUsed,
    PersonVerdict,
)
from activities.ledger.statements import (
    DOCUMENTS,
    Document,
    as_json,
    clean,
    fill,
    fill_incident,
    fill_latest,
    incident_parts,
    incident_query,
    incident_record,
    insert,
    intervals,
    newest_run,
    run_to_write,
    this_run,
    version_query,
    version_row,
)
from activities.ledger.tables import (
    CodeVersions,
    Generations,
    IncidentEvents,
    IncidentLooks,
    Incidents,
    IncidentVerdicts,
    Intervals,
    Jobs,
    MachineEvents,
)
from activities.ledger.time_spent import TimeSpent, ettr_of_run, spent_of_run
from everstep.decisions.training_time.ettr import Ettr, Interval, Kind
from everstep.errors import LedgerError
from everstep.model.evidence import Evidence
from everstep.model.incident import Anomaly, IncidentReport
from everstep.model.job import JobSpec
from everstep.model.version import JobVersion
from everstep.system import private_files as private

P = ParamSpec("P")
T = TypeVar("T")

_CHUNK = 500  # rows per statement: SQLite takes 32,766 parameters


def _make(file: Path) -> None:
    """Make an empty file for SQLite.

    Raises:
        LedgerError: the file cannot be made.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # two workers may notice a lost file at the same time
            if not file.exists():
                # SQLite would write what a lost ledger left in these files into the new one.
                for suffix in ("-wal", "-shm"):
                    file.with_name(file.name + suffix).unlink(missing_ok=True)
                # SQLite gives its other files the same mode.
                os.close(private.open_file(file, os.O_RDWR | os.O_CREAT))
        finally:
            os.close(folder)
    except OSError as error:
        raise LedgerError(f"the ledger {file} cannot be made: {error}") from error


def _identity(url: LedgerUrl) -> tuple[int, int] | None:
    """Return device and inode of the SQLite file; None: there is no file, or the ledger is in PostgreSQL."""
    try:
        found = url.file.stat() if url.file is not None else None
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found else None


class Ledger:
    """A ledger; it is thread-safe. It is opened when it is needed, and again if its file was lost.

    Every method raises LedgerError when the database is unreachable.

    Args:
        url: ``sqlite:////absolute/path/ledger.db`` or ``postgresql+psycopg://user@host/database``.
        create: Make the SQLite file if it does not exist; commands that only read pass False.

    Raises:
        LedgerError: the URL is wrong.
    """

    def __init__(self, url: str, *, create: bool = True) -> None:
        self.url = LedgerUrl(url)
        self._create = create
        self._engine: Engine | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of the SQLite file that is open."""
        self._opening = threading.Lock()
        self._threads = ThreadPoolExecutor(POOL_SIZE, thread_name_prefix="ledger")

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> Ledger:
        """Return a ledger that is open.

        Raises:
            LedgerError: see :meth:`ready`.
        """
        ledger = cls(url, create=create)
        ledger.ready()
        return ledger

    def ready(self) -> Engine:
        """Open the ledger and bring its tables up to date, unless that was done.

        A file that is cut off, or that is no database, is noticed here. Damage inside the file is noticed by the call
        that meets it, or by :meth:`check`, which reads the whole file. A killed process does not damage the file.

        Raises:
            LedgerError: the ledger is unreachable, is damaged, is newer than this release, or another thread opens it.
        """
        if (engine := self._engine) is not None and self._file == _identity(self.url):
            return engine
        if not self._opening.acquire(blocking=False):  # it may take long, and nothing waits for a ledger
            raise LedgerError(f"the ledger {self.url} is not open yet: try again")
        try:
            if self._engine is not None:
                self._engine.dispose()  # otherwise rows would be written to a file that was removed
            self._engine = None
            self._engine = self._opened()
            self._file = _identity(self.url)
            return self._engine
        finally:
            self._opening.release()

    def _opened(self) -> Engine:
        file = self.url.file
        if file is not None and not file.exists():
            if not self._create:
                raise LedgerError(f"there is no ledger at {file}: run a job first, or name another with --ledger")
            _make(file)
        engine = connect(self.url)
        try:
            migrate(engine, self.url)
        except BaseException:
            engine.dispose()
            raise
        return engine

    def close(self) -> None:
        """Wait for the running calls and close the connections."""
        self._threads.shutdown()
        if self._engine is not None:
            self._engine.dispose()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def call(self, method: Callable[Concatenate[Ledger, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method in the ledger's threads: ``await ledger.call(Ledger.jobs)``.

        Cancelling the await does not stop the call. The call may be repeated, because every write is idempotent.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: method(self, *args, **kwargs))

    # Writes.

    def job_started(self, spec: JobSpec, *, started_ns: int) -> NumbersUsed:
        """Open a run of a job; await this call before any other row of the run is written.

        Returns:
            The numbers that earlier runs of this name have used; the new run continues from them.
        """
        with self.writing(spec.name) as connection:
            stub = (Jobs.name == spec.name) & (Jobs.started_ns == 0)
            known = connection.scalar(select(Jobs.run).where(Jobs.name == spec.name, Jobs.started_ns == started_ns))
            if known is None:
                connection.execute(update(Jobs).where(stub).values(started_ns=started_ns))
            key = {"name": spec.name, "started_ns": started_ns}
            fill(connection, Jobs, key, {"spec": as_json(spec.without_secrets())})
            run = connection.scalar(select(Jobs.run).filter_by(**key))
            earlier_runs = select(Jobs.run).where(Jobs.name == spec.name, Jobs.run != run)
            return NumbersUsed(
                incidents=connection.scalar(select(func.max(Incidents.number)).where(Incidents.run.in_(earlier_runs)))
                or 0,
                generations=connection.scalar(
                    select(func.max(Generations.generation)).where(Generations.run.in_(earlier_runs))
                )
                or 0,
            )

    def job_ended(self, job: str, *, ended_ns: int, outcome: str) -> None:
        """Close the newest run of a job among the runs that had started by ``ended_ns``, so that a late attempt does
        not close a later run."""
        with self.writing(job) as connection:
            run = run_to_write(connection, job, by_ns=ended_ns)
            connection.execute(
                update(Jobs)
                .where(Jobs.run == run, Jobs.ended_ns.is_(None))
                .values(ended_ns=ended_ns, outcome=clean(outcome))
            )

    def generation_launched(
        self, job: str, generation: int, *, resume_step: int, launched_ns: int, forked_ns: int = 0, reason: str = ""
    ) -> None:
        """Note that a generation was started; ``forked_ns`` is 0 if it is not known."""
        learned = {
            "resume_step": resume_step,
            "launched_ns": launched_ns,
            "forked_ns": forked_ns or None,
            "reason": clean(reason),
        }
        self._generation(job, generation, learned)

    def generation_stepped(self, job: str, generation: int, *, stepped_ns: int) -> None:
        """Note when all ranks of a generation had completed a step. If their steps cannot be seen, it is the time at
        which they counted as alive."""
        self._generation(job, generation, {"stepped_ns": stepped_ns or None})

    def _generation(self, job: str, generation: int, learned: dict[str, Any]) -> None:
        with self.writing(job) as connection:
            fill(connection, Generations, {"run": run_to_write(connection, job), "generation": generation}, learned)

    def incident_opened(self, id: str, anomaly: Anomaly, *, opened_ns: int) -> None:
        """Note a new incident; ``id`` is the id of its workflow, ``incident/<job>/<number>``."""
        learned = {
            "correlation_id": anomaly.id,
            "symptom": str(anomaly.symptom),
            "headline": clean(anomaly.headline),
            "anomaly": as_json(anomaly),
            "quiet_s": anomaly.quiet_s,
            "seen_ns": anomaly.seen_ns or None,
            "opened_ns": opened_ns,
        }
        self._incident(id, learned)

    def incident_evidence(self, id: str, evidence: Evidence) -> None:
        """Keep the evidence that the machines gave after the stop; an incident's first evidence is never replaced."""
        self._incident(id, {"evidence": as_json(evidence)})

    def incident_event(self, id: str, position: int, *, time_ns: int, stage: str, text: str) -> None:
        """Note an observation, a decision or an action of an incident; positions give the order and start at 1."""
        row = {"time_ns": time_ns, "stage": clean(stage), "text": clean(text)}
        with self.writing(incident_parts(id)[0]) as connection:
            key = fill_incident(connection, id, {})
            fill(connection, IncidentEvents, key | {"position": position}, row)

    def incident_closed(self, id: str, report: IncidentReport, *, closed_ns: int) -> None:
        """Close an incident with its report; the symptom of the report's first failure replaces the watcher's
        symptom."""
        learned = {
            "closed_ns": closed_ns,
            "resolution": clean(report.resolution),
            "cause": clean(report.cause),
            "step": report.step,
            "lost_steps": report.lost_steps,
            "seconds": report.seconds,
            "evicted": report.evicted,
            "recovered": report.recovered and report.confirmed,
            "report": as_json(report),
            "stages": [(clean(one.name), one.seconds) for one in report.timings if math.isfinite(one.seconds)],
        }
        with self.writing(incident_parts(id)[0]) as connection:
            key = fill_incident(connection, id, learned)
            if report.failures:  # the watcher may have reported only a consequence of the first failure
                row = (Incidents.run == key["run"]) & (Incidents.number == key["number"])
                connection.execute(update(Incidents).where(row).values(symptom=str(report.failures[0].symptom)))

    def add_samples(self, id: str, looks: Sequence[tuple[int, str, int, bytes]]) -> None:
        """Keep whole stacks of ranks, each with the number of its sample, the machine, the time (ns) and the answer."""
        with self.writing(incident_parts(id)[0]) as connection:
            key = fill_incident(connection, id, {})
            rows = [
                key | {"look": look, "machine": clean(machine), "time_ns": time_ns, "data": data}
                for look, machine, time_ns, data in looks
            ]
            for start in range(0, len(rows), _CHUNK):
                chunk = rows[start : start + _CHUNK]
                connection.execute(insert(connection, IncidentLooks).values(chunk).on_conflict_do_nothing())

    def verdict_given(self, incident: IncidentRecord, *, was: str, operator: str, note: str, time_ns: int) -> None:
        """Keep what a person decided about the cause of an incident; earlier decisions are kept, too."""
        row = {"was": was, "operator": clean(operator), "note": clean(note), "time_ns": time_ns}
        with self.writing(incident.job) as connection:
            statement = insert(connection, IncidentVerdicts)
            key = {"run": incident.run, "number": incident.number}
            connection.execute(statement.values({**key, **row}).on_conflict_do_nothing())

    def _incident(self, id: str, learned: dict[str, Any]) -> None:
        with self.writing(incident_parts(id)[0]) as connection:
            fill_incident(connection, id, learned)

    def machine_events_seen(self, events: Sequence[MachineEventRecord]) -> None:
        """Keep several observations in one transaction."""
        rows = [{name: clean(value) for name, value in event.model_dump().items()} for event in events]
        with self.writing("machine events") as connection:
            for start in range(0, len(rows), _CHUNK):
                chunk = rows[start : start + _CHUNK]
                connection.execute(insert(connection, MachineEvents).values(chunk).on_conflict_do_nothing())

    def interval(self, job: str, *, start_ns: int, end_ns: int | None, kind: Kind, cause: str = "") -> None:
        """Note how a run spent an interval of time.

        The key is job, kind and start. An interval with ``end_ns`` None is open; call again with the same key to set
        its end.
        """
        with self.writing(job) as connection:
            key = {"run": run_to_write(connection, job), "kind": kind, "start_ns": start_ns}
            fill(connection, Intervals, key, {"end_ns": end_ns, "cause": clean(cause) or None})

    def versions_seen(self, job: str, versions: Sequence[JobVersion], *, seen_ns: int) -> None:
        """Keep the versions of a job's newest run, with their state at ``seen_ns``. A stored state that was seen later
        is not replaced."""
        with self.writing(job) as connection:
            run = run_to_write(connection, job, by_ns=seen_ns)
            for version in versions:
                fill_latest(
                    connection, CodeVersions, {"run": run, "number": version.number}, version_row(version, seen_ns)
                )

    # Reads.

    def check(self) -> None:
        """Read the whole SQLite file, which takes seconds for each GB; PostgreSQL checks its own pages.

        Raises:
            LedgerError: the file is damaged.
        """
        if self.url.file is None:
            return
        with self.reading() as connection:
            answer = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        if answer != "ok":
            raise LedgerError(f"the ledger {self.url}: {answer}; {DAMAGED}")

    def jobs(self) -> list[LedgerJob]:
        """Return all runs of all jobs, newest first."""
        with self.reading() as connection:
            rows = connection.execute(select(Jobs.__table__).order_by(Jobs.started_ns.desc(), Jobs.run.desc()))
            return [LedgerJob.model_validate(row) for row in rows]

    def generations(self, job: str) -> list[GenerationRecord]:
        """Return the launches of a job's newest run, in order."""
        with self.reading() as connection:
            rows = connection.execute(
                select(Generations.__table__).where(Generations.run == newest_run(job)).order_by(Generations.generation)
            )
            return [GenerationRecord.model_validate(row) for row in rows]

    def incidents(
        self,
        job: str | None = None,
        *,
        limit: int | None = None,
        since_ns: int | None = None,
        documents: Sequence[Document] = (),
    ) -> list[IncidentRecord]:
        """Return the incidents of all runs, newest first, without their events.

        Args:
            job: Only incidents of this job.
            limit: At most this many.
            since_ns: Only those that began later, nanoseconds.
            documents: The large parts that are read; the others are None in the answer.
        """
        query = incident_query(documents).order_by(
            func.coalesce(Incidents.opened_ns, Incidents.closed_ns, 0).desc(),
            Incidents.run.desc(),
            Incidents.number.desc(),
        )
        if since_ns is not None:
            begun = func.coalesce(Incidents.seen_ns, Incidents.opened_ns, Incidents.closed_ns, 0)
            query = query.where(begun >= since_ns)
        if job is not None:
            query = query.where(Jobs.name == job)
        with self.reading() as connection:
            return [incident_record(row) for row in connection.execute(query.limit(limit)).mappings()]

    def incident(self, id: str) -> IncidentRecord | None:
        """Return an incident with its events; if its id was used twice, the newest incident with this id."""
        with self.reading() as connection:
            query = incident_query(DOCUMENTS).where(Incidents.id == id).order_by(Incidents.run.desc()).limit(1)
            row = connection.execute(query).mappings().first()
            if row is None:
                return None
            events = connection.execute(
                select(IncidentEvents.__table__)
                .where(IncidentEvents.run == row["run"], IncidentEvents.number == row["number"])
                .order_by(IncidentEvents.position)
            )
            return incident_record(row, [IncidentEventRecord.model_validate(event) for event in events])

    def verdicts(self) -> list[PersonVerdict]:
        """Return the newest decision of a person about each incident, in the order of time."""
        query = (
            select(Incidents.id.label("incident"), IncidentVerdicts.__table__)
            .join_from(
                IncidentVerdicts,
                Incidents,
                (Incidents.run == IncidentVerdicts.run) & (Incidents.number == IncidentVerdicts.number),
            )
            .order_by(IncidentVerdicts.time_ns)
        )
        with self.reading() as connection:
            rows = [PersonVerdict.model_validate(row) for row in connection.execute(query).all()]
        return list({(row.incident, row.run): row for row in rows}.values())

    def looks(self, id: str) -> list[tuple[int, str, int, bytes]]:
        """Return the samples of an incident, in order; if its id was used twice, those of the newest incident."""
        newest = select(func.max(Incidents.run)).where(Incidents.id == id).scalar_subquery()
        query = (
            select(IncidentLooks.look, IncidentLooks.machine, IncidentLooks.time_ns, IncidentLooks.data)
            .where(IncidentLooks.run == newest, IncidentLooks.number == incident_parts(id)[1])
            .order_by(IncidentLooks.look, IncidentLooks.machine)
        )
        with self.reading() as connection:
            return [(look, machine, time_ns, data) for look, machine, time_ns, data in connection.execute(query)]

    def versions(self, job: str, *, all_runs: bool = False) -> list[CodeVersionRecord]:
        """Return the code versions of a job, of its newest run or of all runs, oldest first."""
        query = version_query().where(Jobs.name == job).order_by(Jobs.started_ns, Jobs.run, CodeVersions.number)
        if not all_runs:
            query = query.where(Jobs.run == newest_run(job))
        with self.reading() as connection:
            return [CodeVersionRecord.model_validate(dict(row)) for row in connection.execute(query).mappings()]

    def machine_events(
        self, job: str | None = None, *, kind: str | None = None, limit: int | None = None
    ) -> list[MachineEventRecord]:
        """Return the agents' observations, oldest first; with a limit, only the newest ones."""
        query = select(MachineEvents.__table__).order_by(MachineEvents.time_ns.desc(), MachineEvents.observation.desc())
        if job is not None:
            query = query.where(MachineEvents.job == job)
        if kind is not None:
            query = query.where(MachineEvents.kind == kind)
        with self.reading() as connection:
            rows = connection.execute(query.limit(limit)).all()
        return [MachineEventRecord.model_validate(row) for row in reversed(rows)]

    def intervals(self, job: str) -> list[Interval]:
        """Return how the newest run of a job spent its time, from noted intervals, launches and incidents."""
        with self.reading() as connection:
            return intervals(connection, newest_run(job))

    def ettr(
        self, job: str, *, now_ns: int, window_s: float | None = None, quiet_since_ns: int | None = None
    ) -> Ettr | None:
        """Return the ETTR of the newest run, up to its end or now; None: the job or its start is not known.

        Args:
            job: The name of the job.
            now_ns: The present time, nanoseconds.
            window_s: The length of a sliding window up to now, seconds; None: since the start.
            quiet_since_ns: The time since which no rank has stepped; None: ranks step, or it is not known.
        """
        with self.reading() as connection:
            run = newest_run(job)
            return ettr_of_run(connection, run, now_ns=now_ns, window_s=window_s, quiet_since_ns=quiet_since_ns)

    def time_spent(
        self,
        job: str | int,
        *,
        now_ns: int,
        since_ns: Sequence[int | None] = (None,),
        quiet_since_ns: int | None = None,
        parked: Mapping[str, bool] | None = None,
    ) -> list[TimeSpent] | None:
        """Return how a run spent its time, with the causes of unproductive time; None: as in :meth:`ettr`.

        Args:
            job: The job's name, for its newest run, or the number of a run.
            now_ns: The present time, nanoseconds.
            since_ns: The starts of the periods, which all end now; None: the start of the run.
            quiet_since_ns: See :meth:`ettr`.
            parked: Id of an open incident → whether the job is parked now, if it is known.
        """
        run = newest_run(job) if isinstance(job, str) else this_run(job)
        with self.reading() as connection:
            return spent_of_run(
                connection, run, now_ns=now_ns, since_ns=since_ns, quiet_since_ns=quiet_since_ns, parked=parked or {}
            )

    def reading(self) -> AbstractContextManager[Connection]:
        """Open a transaction that only reads."""
        return reading(self.ready(), self.url)

    def writing(self, lock: str) -> AbstractContextManager[Connection]:
        """Open a transaction that writes; no other one with the same lock name runs at the same time."""
        return writing(self.ready(), self.url, lock)
