"""What the ledger answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everstep.model.evidence import Evidence
from everstep.model.incident import IncidentReport
from everstep.model.version import JobVersion


class LedgerAnswer(BaseModel):
    """Base of the answers. Times are nanoseconds of the wall clock, None where not known (yet)."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


class NumbersUsed(LedgerAnswer):
    """The highest numbers that runs of this name have used before, 0 when none.

    A job that counts on from here never uses the id of an incident or the
    number of a generation twice.
    """

    incidents: int = 0
    generations: int = 0
    ettr: float | None = None
    """Of a run that is over: the share of its time in which it trained, 0 to 1; None: not known, or it is not over."""
    ettr_last_hour: float | None = None


class LedgerJob(LedgerAnswer):
    """One run of a job."""

    run: int
    name: str
    started_ns: int
    """0: not known."""
    ended_ns: int | None = None
    outcome: str | None = None
    """Why the run ended; None while it runs."""
    spec: dict[str, Any] | None = None


class GenerationRecord(LedgerAnswer):
    """One launch of a job at full width."""

    generation: int
    resume_step: int | None = None
    launched_ns: int | None = None
    forked_ns: int | None = None
    stepped_ns: int | None = None
    """When the last rank completed its first step; for a script that shows no steps: when it counted as alive."""
    reason: str | None = None


class IncidentEventRecord(LedgerAnswer):
    """One thing that was seen, decided or done."""

    position: int
    time_ns: int
    stage: str
    text: str


class IncidentRecord(LedgerAnswer):
    """An incident; its events come with ``Ledger.incident`` only."""

    id: str
    """Workflow id, ``incident/<job>/<number>``."""
    job: str
    run: int
    number: int
    correlation_id: str | None = None
    symptom: str | None = None
    headline: str | None = None
    anomaly: dict[str, Any] | None = None
    evidence: dict[str, Any] | None = None
    seen_ns: int | None = None
    """When the machine saw the fault."""
    opened_ns: int | None = None
    closed_ns: int | None = None
    resolution: str | None = None
    cause: str | None = None
    step: int | None = None
    lost_steps: int | None = None
    seconds: float | None = None
    """From the fault to the first step of all ranks."""
    evicted: list[str] = Field(default_factory=list)
    recovered: bool | None = None
    """None while the incident is open."""
    report: dict[str, Any] | None = None
    problem: str = ""
    """What of its row cannot be read, and is left out here; empty: nothing."""
    events: list[IncidentEventRecord] = Field(default_factory=list)

    @property
    def fault_ns(self) -> int | None:
        """The moment that times in a report count from: the fault, or else the opening."""
        return self.seen_ns or self.opened_ns

    def parsed_report(self) -> IncidentReport | None:
        """The report as a model, or None when there is none or this release cannot read it."""
        try:
            return None if self.report is None else IncidentReport.model_validate(self.report)
        except ValidationError:
            return None

    def parsed_evidence(self) -> Evidence | None:
        """The evidence as a model, or None when there is none or this release cannot read it."""
        try:
            return None if self.evidence is None else Evidence.model_validate(self.evidence)
        except ValidationError:
            return None


class MachineEventRecord(LedgerAnswer):
    """One observation of an agent."""

    observation: str
    """Its id, ``<machine>-<sequence>``."""
    machine: str
    job: str
    """Empty: it belongs to no job."""
    time_ns: int
    kind: str
    text: str


class CodeVersionRecord(LedgerAnswer):
    """A version of a job's code, as it was last."""

    job: str
    run: int
    started_ns: int
    """Of the run; 0: not known."""
    ended_ns: int | None = None
    """Of the run; None: it runs, or was ended from outside."""
    outcome: str | None = None
    """Of the run."""
    number: int
    id: str
    status: str
    version: dict[str, Any]

    def parsed(self) -> JobVersion | None:
        """The version as a model; None: this release cannot read it."""
        try:
            return JobVersion.model_validate(self.version)
        except ValidationError:
            return None
