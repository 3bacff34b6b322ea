"""The tables of the ledger.

A job's name may be used again, so rows belong to a *run* of the job. Columns whose values are not known yet are NULL.
Times are nanoseconds of the wall clock.

Changing a table needs a new file in ``migrations/versions``; a test compares the tables with these files.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class LedgerTable(DeclarativeBase):
    """Base of the tables."""

    metadata = MetaData(naming_convention=_NAMES)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON(none_as_null=True),
        list[str]: JSON(none_as_null=True),
        int: BigInteger,
        float: Float,
        str: String,
        bytes: LargeBinary,
    }


class Jobs(LedgerTable):
    """One row per run of a job."""

    __tablename__ = "jobs"
    __table_args__ = (UniqueConstraint("name", "started_ns"),)

    # Integer, not BigInteger: SQLite numbers rows automatically only in an INTEGER column.
    run: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    name: Mapped[str]
    started_ns: Mapped[int]
    """The start of the run; 0: another row of this run arrived first, and the start is not known yet."""
    ended_ns: Mapped[int | None]
    outcome: Mapped[str | None]
    spec: Mapped[dict[str, Any] | None]


class Generations(LedgerTable):
    """One row per launch of a job with all of its ranks."""

    __tablename__ = "generations"

    run: Mapped[int] = mapped_column(ForeignKey("jobs.run"), primary_key=True)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    resume_step: Mapped[int | None]
    launched_ns: Mapped[int | None]
    forked_ns: Mapped[int | None]
    stepped_ns: Mapped[int | None]
    reason: Mapped[str | None]


class Incidents(LedgerTable):
    """One row per incident; its number is unique within a run.

    The row is small and is never deleted: the ETTR of a run is computed from it, and its number is not used again.
    """

    __tablename__ = "incidents"
    __table_args__ = (Index(None, "id"), Index(None, "opened_ns"))

    run: Mapped[int] = mapped_column(ForeignKey("jobs.run"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    id: Mapped[str]
    """The id of the incident's workflow, ``incident/<job>/<number>``."""
    correlation_id: Mapped[str | None]
    symptom: Mapped[str | None]
    headline: Mapped[str | None]
    quiet_s: Mapped[float | None]
    """For how long the job had not stepped when the anomaly was seen, seconds."""
    seen_ns: Mapped[int | None]
    opened_ns: Mapped[int | None]
    closed_ns: Mapped[int | None]
    resolution: Mapped[str | None]
    cause: Mapped[str | None]
    step: Mapped[int | None]
    lost_steps: Mapped[int | None]
    seconds: Mapped[float | None]
    evicted: Mapped[list[str] | None]
    recovered: Mapped[bool | None]
    stages: Mapped[Any | None] = mapped_column(JSON(none_as_null=True))
    """The stages of its report in order, each as a list of its name and its seconds."""
    cleaned_ns: Mapped[int | None]
    """When its details were deleted, because they were old or the ledger was too large."""


class IncidentDocuments(LedgerTable):
    """The large parts of an incident, apart from its row, so that a query of many incidents does not read them."""

    __tablename__ = "incident_documents"
    __table_args__ = (ForeignKeyConstraint(["run", "number"], ["incidents.run", "incidents.number"]),)

    run: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    anomaly: Mapped[dict[str, Any] | None]
    evidence: Mapped[dict[str, Any] | None]
    report: Mapped[dict[str, Any] | None]


class IncidentEvents(LedgerTable):
    """The observations, decisions and actions of an incident, in order of position."""

    __tablename__ = "incident_events"
    __table_args__ = (ForeignKeyConstraint(["run", "number"], ["incidents.run", "incidents.number"]),)

    run: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    time_ns: Mapped[int]
    stage: Mapped[str]
    text: Mapped[str]


class MachineEvents(LedgerTable):
    """The agents' observations. The time is in the key, because an agent that has lost its log counts from 1 again."""

    __tablename__ = "machine_events"
    __table_args__ = (Index(None, "job", "time_ns"), Index(None, "time_ns"))

    observation: Mapped[str] = mapped_column(String, primary_key=True)
    time_ns: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    machine: Mapped[str]
    job: Mapped[str]
    kind: Mapped[str]
    text: Mapped[str]


class Intervals(LedgerTable):
    """The intervals of a run's time, by kind; an end of NULL means that the interval is open."""

    __tablename__ = "intervals"

    run: Mapped[int] = mapped_column(ForeignKey("jobs.run"), primary_key=True)
    kind: Mapped[str] = mapped_column(String, primary_key=True)
    start_ns: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    end_ns: Mapped[int | None]
    cause: Mapped[str | None]


class IncidentVerdicts(LedgerTable):
    """What people decided about the cause of an incident; the newest row counts."""

    __tablename__ = "incident_verdicts"
    __table_args__ = (ForeignKeyConstraint(["run", "number"], ["incidents.run", "incidents.number"]),)

    run: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    time_ns: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    was: Mapped[str]
    """The owner of the fault (``Owner``)."""
    operator: Mapped[str]
    note: Mapped[str]


class IncidentLooks(LedgerTable):
    """The samples of an incident: one row has the whole stacks of a machine's ranks that matter, in one sample."""

    __tablename__ = "incident_looks"
    __table_args__ = (ForeignKeyConstraint(["run", "number"], ["incidents.run", "incidents.number"]),)

    run: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    look: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    machine: Mapped[str] = mapped_column(String, primary_key=True)
    time_ns: Mapped[int]
    data: Mapped[bytes]
    """A StacksReply of the agent (``proto/agent/v1/agent.proto``) with compressed stacks and flight records."""


class CodeVersions(LedgerTable):
    """One row per version of a job's code."""

    __tablename__ = "code_versions"

    run: Mapped[int] = mapped_column(ForeignKey("jobs.run"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    id: Mapped[str]
    """The version's content address; empty: the version was requested, and its snapshot was never made."""
    status: Mapped[str]
    operator: Mapped[str]
    reason: Mapped[str]
    asked_ns: Mapped[int]
    changed: Mapped[str]
    ended: Mapped[str]
    version: Mapped[dict[str, Any]]
    """The version as JSON."""
    seen_ns: Mapped[int]
    """The time at which this state was seen, nanoseconds."""


class Cleanings(LedgerTable):
    """How much was deleted since the ledger was made, because it was old or the ledger was too large."""

    __tablename__ = "cleanings"

    what: Mapped[str] = mapped_column(String, primary_key=True)
    """``incidents``, ``samples`` or ``machine events``."""
    removed: Mapped[int]
    """The number of incidents without details, or of rows that were deleted."""
    last_ns: Mapped[int]
    """The time of the last cleaning."""
