"""Takes over after an incident that was closed from outside; ``everstep.decisions.act.recover.reopen`` decides how."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.read_closed_incident import ReadClosedIncident
    from everstep.decisions.act.recover.reopen import hold_reason, newest_begin, newest_generation, reopen_wait_s
    from everstep.decisions.keep.lineage import extended
    from everstep.model.incident import CLOSED_OUTSIDE, Anomaly, IncidentReport, Left
    from everstep.model.job_state import JobState, incident_workflow_id
    from workflows.ledger_entries import Closings
    from workflows.start_activity import start_activity

T = TypeVar("T")
LAST_POSITION = 1_000_000
"""The position of the ledger entry that closes such an incident. It is after all entries that the incident wrote."""


class Reopening:
    """Handles the incidents of a job that were closed from outside.

    Args:
        state: The job's state, which is changed.
        next_event: Returns what the job must do next.
        closings: The ledger entries that the job writes for an incident.
    """

    def __init__(self, state: JobState, next_event: Callable[[], str], closings: Closings) -> None:
        self._state = state
        self._next_event = next_event
        self._closings = closings

    async def closed(self, number: int, anomaly: Anomaly, opened_ns: int) -> tuple[Left, IncidentReport] | None:
        """Take over the generations that a closed incident launched, and write a report in place of its own report.

        Checkpoints in memory are kept.

        Returns:
            The effects of the incident, and the report; None: the job was stopped meanwhile.
        """
        state, incident = self._state, incident_workflow_id(self._state.spec.name, number)
        left = await self._unless_stopped(start_activity(ReadClosedIncident(incident=incident)))
        if left is None:
            return None
        state.resume_step = newest_begin(state.resume_step, left)
        state.lineage = extended(state.lineage, left.launches)
        state.generation = newest_generation(state.generation, left)
        state.emptied = left.emptied
        headline = f"{left.how[:1].upper()}{left.how[1:]}: {anomaly.headline}"
        report = substitute_report(anomaly, headline, CLOSED_OUTSIDE, state.generation, state.resume_step)
        self._closings.write(state.spec.name, incident, anomaly, opened_ns, report, position=LAST_POSITION)
        return left, report

    def reopen(self, number: int, anomaly: Anomaly, left: Left) -> None:
        """Open the fault again; its next incident waits for an operator."""
        state = self._state
        state.closed_outside += 1
        state.hold = hold_reason(incident_workflow_id(state.spec.name, number), left)
        # One incident per generation: another report of this generation, which may have come meanwhile, is dropped.
        later = [pending for pending in state.pending if pending.generation != state.generation]
        state.pending = [anomaly.model_copy(update={"generation": state.generation}), *later]

    async def pause(self) -> None:
        """Wait before the fault's next incident; the wait grows with the number of incidents closed from outside."""
        wait = timedelta(seconds=reopen_wait_s(self._state.closed_outside))
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(lambda: self._next_event() != "anomaly", timeout=wait, timeout_summary="WAIT")

    def over(self) -> None:
        """Note that the fault is over."""
        self._state.closed_outside, self._state.hold, self._state.emptied = 0, "", []

    async def _unless_stopped(self, started: workflow.ActivityHandle[T]) -> T | None:
        """Return the result of an activity that is retried for ever; None: the job was stopped before that."""
        stopped = asyncio.create_task(workflow.wait_condition(lambda: self._next_event() == "stop"))
        await workflow.wait([started, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if started.done():
            return started.result()
        started.cancel()
        return None


def substitute_report(
    anomaly: Anomaly, headline: str, resolution: str, generation: int, resume_step: int = -1
) -> IncidentReport:
    """Return a report in place of the report of an incident that could not write its own."""
    return IncidentReport(
        headline=headline,
        resolution=resolution,
        cause=str(anomaly.symptom),
        step=-1,
        lost_steps=None,
        evicted=[],
        stages=[],
        generation=generation,
        resume_step=resume_step,
        recovered=False,
        seconds=None,
        failures=[],
    )
