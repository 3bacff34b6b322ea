"""The timeline of one incident: it shows each stage on the living page, in Temporal's timeline and in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.write_to_ledger import WriteConclusion
    from everstep.decisions.act.recover.incident_state import IncidentState
    from everstep.model.evidence import Evidence
    from everstep.model.incident import IncidentReport
    from everstep.model.job_state import job_workflow_id, replay_workflow_id
    from everstep.model.launch import Launched
    from everstep.model.stage import Stage, StageRecord
    from workflows import attributes, web_ui
    from workflows.start_activity import start_activity

OPERATOR_JSON = 'e.g. {"operator": "you", "note": "why"}'
CLOSING_S = 1.0
"""The longest wait of a closed incident for the ledger."""
ACCEPT_JSON = '{"operator": "you", "note": "why", "accept_loss": true}'


class IncidentTimeline:
    """Shows and stores the reports of the incident's workflow."""

    def __init__(self, state: IncidentState, id: str) -> None:
        self._state = state
        self._id = id
        self._notes: list[workflow.ActivityHandle[Any]] = []
        self.page = state.page
        self.stage: Stage = Stage.OPEN
        self.since_ns = state.opened_ns
        """The time when the current stage was entered, nanoseconds."""
        self.reason = ""
        """Why the current stage was entered; empty: the headline is the reason."""
        self.to_accept = ""
        """The step from which an operator may resume although a newer step may exist, as text; empty: none."""
        self.to_approve = ""
        """Machines that leave a parked job once an operator approves it; empty: there are none."""

    def enter(self, stage: Stage, reason: str = "") -> float:
        """Begin a stage; returns the time, for :meth:`leave`."""
        self.stage, self.reason, self.since_ns = stage, reason, workflow.time_ns()
        severity = "page" if stage == Stage.PARKED else "info"
        workflow.upsert_search_attributes(attributes.updates({attributes.STAGE: stage, attributes.SEVERITY: severity}))
        workflow.logger.info("stage entered", extra={"stage": stage, "correlation": self._state.anomaly.id})
        self.show()
        return workflow.time()

    def show_reason(self, reason: str) -> None:
        """Show what the current stage waits for."""
        self.reason = reason
        self.show()

    def leave(self, began: float, stage: Stage, found: str) -> None:
        """End a stage with its result."""
        self.page.stages.append(
            StageRecord(name=stage, seconds=round(workflow.time() - began, 4), found=web_ui.summary(found))
        )
        self.show()

    def reject(self, text: str) -> None:
        """Show on the page that a message was invalid."""
        self.page.rejected.append(text)
        self.show()

    def show(self) -> None:
        """Update the page."""
        parked = (
            f"**Parked: needs an operator.** Send the signal `resume` or `abandon`, {OPERATOR_JSON}"
            if self.stage == Stage.PARKED
            else ""
        )
        if parked and self.to_approve:
            parked = (
                f"**Parked: an operator has to approve that {self.to_approve} may leave.** Send the signal, or update, "
                f"`approve`; or the signal `resume` to continue without that, or `abandon`, {OPERATOR_JSON}"
            )
        if parked and self.to_accept:
            parked += (
                f". `resume` asks again; with {ACCEPT_JSON} the job resumes {self.to_accept}, even if newer steps exist"
            )
        linked = {"Job": job_workflow_id(self._state.job)}
        if self.page.replays:
            linked["Replay"] = replay_workflow_id(self._state.job, self._state.number, self.page.replays)
        rejected = "\n".join(f"- REJECTED: {line}" for line in self.page.rejected[-5:])
        workflow.set_current_details(
            web_ui.incident_page(
                self.reason
                if self.stage in {Stage.OBSERVED, Stage.RECOVERED, Stage.NOT_CONFIRMED, Stage.ABANDONED}
                else f"{self.stage}: {self.reason or self.page.headline}",
                self.page.stages,
                workflow.info().namespace,
                linked,
                "\n\n".join(part for part in (parked, rejected, web_ui.drawn(self.page.picture)) if part),
            )
        )

    def note(
        self,
        stage: Stage,
        text: str,
        evidence: Evidence | None = None,
        report: IncidentReport | None = None,
        launched: Launched | None = None,
    ) -> None:
        """Write an entry into the timeline and the ledger, without delaying the recovery."""
        self.page.noted += 1
        entry = WriteConclusion(
            incident=self._id,
            job=self._state.job,
            anomaly=self._state.anomaly,
            opened_ns=self._state.opened_ns,
            position=self.page.noted,
            time_ns=workflow.time_ns(),
            stage=stage,
            text=text,
            evidence=evidence,
            launched=launched,
            report=report,
            parked=self.page.parked if report else [],
        )
        self._notes.append(start_activity(entry))

    async def written(self) -> None:
        """Wait until every entry is in the ledger, or was given up: the incident does not fail if the ledger is
        unreachable."""
        await asyncio.gather(*self._notes, return_exceptions=True)

    async def close(self, report: IncidentReport, launched: Launched | None) -> IncidentReport:
        """Write the last entry, and wait for all entries.

        Returns:
            The report. If the ledger did not accept an entry in time, the report has its number, and the job writes the
            entry. The incident waits no longer for it, since the job waits for this incident, and the next incident
            waits for the job.
        """
        values: dict[Any, Any] = {attributes.VERDICT: report.resolution, attributes.LOST_STEPS: report.lost_steps or 0}
        if report.failures:  # the watcher's first symptom may be a consequence of it
            values[attributes.SYMPTOM] = str(report.failures[0].symptom)
        if report.evicted:
            values[attributes.EVICTED] = report.evicted
        workflow.upsert_search_attributes(attributes.updates(values))
        self.note(Stage.CLOSED, report.headline, report=report, launched=launched)
        last = self._notes[-1]
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: all(note.done() for note in self._notes), timeout=CLOSING_S, timeout_summary="LEDGER"
            )
        if last.done() and last.exception() is None:
            return report
        return report.model_copy(update={"unwritten": self.page.noted, "launched": launched})
