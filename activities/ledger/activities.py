"""Activities that write the ledger: conclusions of incidents, and the life of a job.

All of them may run twice: the ledger's rows have natural keys and stay as first
written. A ledger that is away delays nothing but its own rows.
"""

from __future__ import annotations

from temporalio import activity

from activities import messages
from activities.heartbeat import heartbeating
from activities.ledger import Ledger, NumbersUsed
from activities.messages import DecideInput, RecordInput
from everstep.decisions.training_time.ettr import WINDOW_S
from everstep.model.incident import IncidentReport
from everstep.model.job_state import ShareTrained
from everstep.model.launch import Confirmation, Launched


class RecordActivities:
    """The activities that talk to the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @activity.defn(name=messages.DECIDE)
    async def decide(self, conclusion: DecideInput) -> None:
        """Write one conclusion of an incident; the last one closes it with its report."""
        async with heartbeating():
            await self._ledger.call(_write_conclusion, conclusion)
        activity.logger.info(
            conclusion.text,
            extra={"incident": conclusion.incident, "stage": conclusion.stage, "correlation": conclusion.anomaly.id},
        )

    @activity.defn(name=messages.RECORD)
    async def record(self, entry: RecordInput) -> NumbersUsed:
        """Write what happened to a job; returns the numbers that earlier runs of its name used."""
        async with heartbeating():
            return await self._ledger.call(_write_job, entry)


def _write_conclusion(ledger: Ledger, conclusion: DecideInput) -> None:
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
        # The ledger keeps no values of variables that look like secrets.
        shown = [version.without_secrets() for version in conclusion.report.versions]
        report = conclusion.report.model_copy(update={"versions": shown})
        ledger.incident_closed(conclusion.incident, report, closed_ns=closed_ns)
        _write_lost_steps(ledger, conclusion.job, conclusion.incident, conclusion.report)


def _write_lost_steps(ledger: Ledger, job: str, incident: str, report: IncidentReport) -> None:
    """The time in which lost steps are done again: at most as many times the first step's time."""
    confirmation = report.confirmation
    if confirmation is None or not report.lost_steps:
        return
    again_s = report.lost_steps * confirmation.parts.get("next step", 0.0)
    end_ns = confirmation.stepped_ns + int(again_s * 1e9)
    ledger.interval(job, start_ns=confirmation.stepped_ns, end_ns=end_ns, kind="lost steps", cause=incident)


def _write_job(ledger: Ledger, entry: RecordInput) -> NumbersUsed:
    used = NumbersUsed()
    if entry.started_ns:
        used = ledger.job_started(entry.spec, started_ns=entry.started_ns)
    _write_generation(ledger, entry.spec.name, entry.launched, entry.confirmation)
    if entry.versions:  # the ledger keeps no values of variables that look like secrets
        versions = [version.without_secrets(entry.spec.redact) for version in entry.versions]
        ledger.versions_seen(entry.spec.name, versions, seen_ns=entry.time_ns)
    if entry.outcome:
        ledger.job_ended(entry.spec.name, ended_ns=entry.time_ns, outcome=entry.outcome)
        shares = [ledger.ettr(entry.spec.name, now_ns=entry.time_ns, window_s=window) for window in (None, WINDOW_S)]
        shown = ShareTrained.shown(*(share.ratio if share else None for share in shares))
        used = used.model_copy(update={"ettr": shown.ettr, "ettr_last_hour": shown.last_hour})
    return used


def _write_generation(ledger: Ledger, job: str, launched: Launched | None, confirmation: Confirmation | None) -> None:
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
