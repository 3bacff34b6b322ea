"""Record job, and write conclusion: write the state of a job, or an entry of an incident, into the ledger.

Both activities may run twice: the ledger's rows have natural keys and keep their first values. An unreachable ledger
delays nothing but these rows.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pydantic import Field
from temporalio import activity
from temporalio.common import RetryPolicy

from activities.activity import Activity, Bounds
from activities.heartbeat import Say
from activities.ledger.records import NumbersUsed
from everstep.decisions.training_time.ettr import WINDOW_S
from everstep.model.evidence import Evidence
from everstep.model.incident import Anomaly, IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import ShareTrained
from everstep.model.launch import Confirmation, Launched
from everstep.model.version import JobVersion

if TYPE_CHECKING:
    from activities.ledger.ledger import Ledger
    from activities.tools import Tools

ON_LEDGER = Bounds(timedelta(seconds=20), timedelta(seconds=30))
"""The write is retried for half a minute; after that the job continues without the entry."""
ON_LEDGER_WHEN_BACK = Bounds(
    timedelta(seconds=20),
    timedelta(hours=1),
    RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=30)),
)
"""The write is retried for an hour, because no recovery waits for it and the ledger may be unreachable for long."""


class RecordJob(Activity[NumbersUsed]):
    """Write the state of a job; the result is the numbers that earlier runs of its name have used."""

    name = "Record job"

    spec: JobSpec
    time_ns: int
    started_ns: int = 0
    """The start of the run, nanoseconds; it is set in the first entry, which opens the run."""
    launched: Launched | None = None
    confirmation: Confirmation | None = None
    outcome: str = ""
    """How the job ended; it is set in the last entry, which closes the run."""
    versions: list[JobVersion] = Field(default_factory=list)
    """The versions of the job's code that changed."""
    label: str = ""
    """A text about the entry, for the timeline; empty: none is needed."""

    def line(self) -> str:
        return self.label or self.outcome or (f"generation {self.launched.generation}" if self.launched else "started")

    def bounds(self) -> Bounds:
        return ON_LEDGER

    async def perform(self, tools: Tools, say: Say) -> NumbersUsed:
        return await tools.ledger.call(_write_job, self)


def _write_job(ledger: Ledger, entry: RecordJob) -> NumbersUsed:
    used = NumbersUsed()
    if entry.started_ns:
        used = ledger.job_started(entry.spec, started_ns=entry.started_ns)
    _write_generation(ledger, entry.spec.name, entry.launched, entry.confirmation)
    if entry.versions:  # the ledger must not contain values of variables that look like secrets
        versions = [version.without_secrets(entry.spec.redact) for version in entry.versions]
        ledger.versions_seen(entry.spec.name, versions, seen_ns=entry.time_ns)
    if entry.outcome:
        ledger.job_ended(entry.spec.name, ended_ns=entry.time_ns, outcome=entry.outcome)
        shares = [ledger.ettr(entry.spec.name, now_ns=entry.time_ns, window_s=window) for window in (None, WINDOW_S)]
        shown = ShareTrained.shown(*(share.ratio if share else None for share in shares))
        used = used.model_copy(update={"ettr": shown.ettr, "ettr_last_hour": shown.last_hour})
    return used


class WriteConclusion(Activity[None]):
    """Write an entry of an incident; the first entry opens it, and the last entry closes it with its report."""

    name = "Decide"

    incident: str
    job: str
    anomaly: Anomaly
    opened_ns: int
    position: int
    """The entry's position within the incident, from 1; it makes a repeated write harmless."""
    time_ns: int
    stage: str
    text: str
    evidence: Evidence | None = None
    launched: Launched | None = None
    report: IncidentReport | None = None
    """The report; it is set in the last entry, which closes the incident."""
    parked: list[tuple[int, int]] = Field(default_factory=list)
    """The times when the job was parked: start and end, nanoseconds."""

    def line(self) -> str:
        return self.text

    def bounds(self) -> Bounds:
        return ON_LEDGER

    async def perform(self, tools: Tools, say: Say) -> None:
        await tools.ledger.call(_write_conclusion, self)
        activity.logger.info(
            self.text, extra={"incident": self.incident, "stage": self.stage, "correlation": self.anomaly.id}
        )


def _write_conclusion(ledger: Ledger, conclusion: WriteConclusion) -> None:
    ledger.incident_opened(conclusion.incident, conclusion.anomaly, opened_ns=conclusion.opened_ns)
    if conclusion.evidence is not None:
        ledger.incident_evidence(conclusion.incident, conclusion.evidence)
    ledger.incident_event(
        conclusion.incident,
        conclusion.position,
        time_ns=conclusion.time_ns,
        stage=conclusion.stage,
        text=conclusion.text,
    )
    _write_generation(
        ledger, conclusion.job, conclusion.launched, conclusion.report.confirmation if conclusion.report else None
    )
    for begin_ns, end_ns in conclusion.parked:
        ledger.interval(conclusion.job, start_ns=begin_ns, end_ns=end_ns, kind="parked", cause=conclusion.incident)
    if conclusion.report is not None:
        confirmation = conclusion.report.confirmation
        closed_ns = confirmation.stepped_ns if confirmation else conclusion.time_ns
        # The ledger must not contain values of variables that look like secrets.
        shown = [version.without_secrets() for version in conclusion.report.versions]
        report = conclusion.report.model_copy(update={"versions": shown})
        ledger.incident_closed(conclusion.incident, report, closed_ns=closed_ns)
        _write_lost_steps(ledger, conclusion.job, conclusion.incident, conclusion.report)


def _write_lost_steps(ledger: Ledger, job: str, incident: str, report: IncidentReport) -> None:
    """Write the interval in which lost steps were repeated: their number times the duration of one step."""
    confirmation = report.confirmation
    if confirmation is None or not report.lost_steps:
        return
    again_s = report.lost_steps * confirmation.parts.get("next step", 0.0)
    end_ns = confirmation.stepped_ns + int(again_s * 1e9)
    ledger.interval(job, start_ns=confirmation.stepped_ns, end_ns=end_ns, kind="lost steps", cause=incident)


def _write_generation(ledger: Ledger, job: str, launched: Launched | None, confirmation: Confirmation | None) -> None:
    """Write the known times of a generation."""
    if launched is not None:
        ledger.generation_launched(
            job,
            launched.generation,
            resume_step=launched.resume_step,
            launched_ns=launched.started_ns,
            forked_ns=launched.forked_ns,
            reason=f"backups: {launched.backups}" if launched.backups else "",
        )
    if confirmation is not None and confirmation.ok:
        ledger.generation_stepped(job, confirmation.generation, stepped_ns=confirmation.stepped_ns)
