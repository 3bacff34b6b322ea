"""The types of the ledger's answers."""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everstep.model.evidence import Evidence
from everstep.model.incident import IncidentReport
from everstep.model.version import JobVersion


class LedgerAnswer(BaseModel):
    """Base of the answers. Times are nanoseconds of the wall clock; None: the time is not known (yet)."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


class NumbersUsed(LedgerAnswer):
    """The highest numbers that earlier runs of this name have used; 0: no number was used.

    A job that continues from these numbers never uses the id of an incident or the number of a generation twice.
    """

    incidents: int = 0
    generations: int = 0
    ettr: float | None = None
    """The ETTR of a run that is over, 0 to 1; None: it is not known, or the run is not over."""
    ettr_last_hour: float | None = None


class LedgerJob(LedgerAnswer):
    """One run of a job."""

    run: int
    name: str
    started_ns: int
    """The start of the run; 0: it is not known."""
    ended_ns: int | None = None
    outcome: str | None = None
    """How the run ended; None while it runs."""
    spec: dict[str, Any] | None = None


class GenerationRecord(LedgerAnswer):
    """A launch of a job with all of its ranks."""

    generation: int
    resume_step: int | None = None
    launched_ns: int | None = None
    forked_ns: int | None = None
    stepped_ns: int | None = None
    """When the last rank completed its first step, or counted as alive if the script shows no steps."""
    reason: str | None = None


class IncidentEventRecord(LedgerAnswer):
    """An observation, a decision or an action of an incident."""

    position: int
    time_ns: int
    stage: str
    text: str


class IncidentRecord(LedgerAnswer):
    """An incident; only ``Ledger.incident`` also returns its events and all of its documents."""

    id: str
    """The id of the incident's workflow, ``incident/<job>/<number>``."""
    job: str
    run: int
    number: int
    correlation_id: str | None = None
    symptom: str | None = None
    headline: str | None = None
    anomaly: dict[str, Any] | None = None
    evidence: dict[str, Any] | None = None
    seen_ns: int | None = None
    """The time at which a machine saw the fault."""
    opened_ns: int | None = None
    closed_ns: int | None = None
    resolution: str | None = None
    cause: str | None = None
    step: int | None = None
    lost_steps: int | None = None
    seconds: float | None = None
    """The time from the fault to the first step of all ranks, seconds."""
    evicted: list[str] = Field(default_factory=list)
    recovered: bool | None = None
    """Whether the job was recovered; None while the incident is open."""
    report: dict[str, Any] | None = None
    cleaned_ns: int | None = None
    """When its documents, events and samples were deleted, because they were old or the ledger was too large."""
    problem: str = ""
    """A text about the columns that cannot be read and are left out; empty: all columns are readable."""
    events: list[IncidentEventRecord] = Field(default_factory=list)

    @property
    def fault_ns(self) -> int | None:
        """The time of the fault; if it is not known, the time at which the incident was opened. The times in a report
        count from here."""
        return self.seen_ns or self.opened_ns

    @property
    def cleaned(self) -> str:
        """A text about its details, if they were deleted; empty: they were not."""
        if self.cleaned_ns is None:
            return ""
        day = time.strftime("%Y-%m-%d", time.localtime(self.cleaned_ns / 1e9))
        return f"its details were deleted on {day} by a worker's --ledger-days or --ledger-gib"

    def parsed_report(self) -> IncidentReport | None:
        """Return the report; None: there is none, or this release cannot read it."""
        try:
            return None if self.report is None else IncidentReport.model_validate(self.report)
        except ValidationError:
            return None

    def parsed_evidence(self) -> Evidence | None:
        """Return the evidence; None: there is none, or this release cannot read it."""
        try:
            return None if self.evidence is None else Evidence.model_validate(self.evidence)
        except ValidationError:
            return None


class PersonVerdict(LedgerAnswer):
    """What a person decided about the cause of an incident."""

    incident: str
    """The id of the incident's workflow."""
    run: int
    was: str
    """The owner of the fault (``Owner``)."""
    operator: str
    note: str = ""
    time_ns: int


class MachineEventRecord(LedgerAnswer):
    """An observation of an agent."""

    observation: str
    """The id of the observation, ``<machine>-<sequence>``."""
    machine: str
    job: str
    """The name of the job; empty: the event belongs to no job."""
    time_ns: int
    kind: str
    text: str


class CodeVersionRecord(LedgerAnswer):
    """A version of a job's code, with its newest known state."""

    job: str
    run: int
    started_ns: int
    """The start of the run; 0: it is not known."""
    ended_ns: int | None = None
    """The end of the run; None: it runs, or was ended from outside."""
    outcome: str | None = None
    """How the run ended."""
    number: int
    id: str
    status: str
    version: dict[str, Any]

    def parsed(self) -> JobVersion | None:
        """Return the version; None: this release cannot read it."""
        try:
            return JobVersion.model_validate(self.version)
        except ValidationError:
            return None
