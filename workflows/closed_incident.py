"""What follows when an incident of a job was closed from outside; see ``everstep.decisions.act.recover.reopen``."""

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
    from workflows.incident.report import Closings
    from workflows.start_activity import start_activity

T = TypeVar("T")
LAST_POSITION = 1_000_000
"""Place of the line in the ledger that closes such an incident: behind whatever it wrote itself."""


class Reopening:
    """Deals with the closed incidents of a job.

    Args:
        state: The job's, changed in place.
        next_event: What the job has to do next, as its workflow says it.
        closings: Entries of the ledger that the job writes in an incident's place.
    """

    def __init__(self, state: JobState, next_event: Callable[[], str], closings: Closings) -> None:
        self._state = state
        self._next_event = next_event
        self._closings = closings

    async def closed(self, number: int, anomaly: Anomaly, opened_ns: int) -> tuple[Left, IncidentReport] | None:
        """What a closed incident left, and the report that it could not give; None: the job is stopped meanwhile.

        The job takes over what the incident had launched. All that is held in memory stays.
        """
        state, incident = self._state, incident_workflow_id(self._state.spec.name, number)
        left = await self._unless_stopped(start_activity(ReadClosedIncident(incident=incident)))
        if left is None:
            return None
        state.resume_step = newest_begin(state.resume_step, left)
        state.lineage = extended(state.lineage, left.launches)
        state.generation = newest_generation(state.generation, left)
        state.emptied = left.emptied
        report = _report(state, anomaly, left)
        self._closings.write(state.spec.name, incident, anomaly, opened_ns, report, position=LAST_POSITION)
        return left, report

    def reopen(self, number: int, anomaly: Anomaly, left: Left) -> None:
        """The fault is open again, and its next incident waits for an operator."""
        state = self._state
        state.closed_outside += 1
        state.hold = hold_reason(incident_workflow_id(state.spec.name, number), left)
        # Also where the same generation was reported meanwhile: one incident for one generation.
        others = [pending for pending in state.pending if pending.generation != state.generation]
        state.pending = [anomaly.model_copy(update={"generation": state.generation}), *others]

    async def pause(self) -> None:
        """Wait before the fault's next incident, the longer the more of them were closed from outside."""
        wait = timedelta(seconds=reopen_wait_s(self._state.closed_outside))
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(lambda: self._next_event() != "anomaly", timeout=wait, timeout_summary="WAIT")

    def over(self) -> None:
        """The fault is dealt with."""
        self._state.closed_outside, self._state.hold, self._state.emptied = 0, "", []

    async def _unless_stopped(self, started: workflow.ActivityHandle[T]) -> T | None:
        """Wait for an activity that is tried for ever, but not longer than the job is wanted."""
        stopped = asyncio.create_task(workflow.wait_condition(lambda: self._next_event() == "stop"))
        await workflow.wait([started, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if started.done():
            return started.result()
        started.cancel()
        return None


def _report(state: JobState, anomaly: Anomaly, left: Left) -> IncidentReport:
    return IncidentReport(
        headline=f"{left.how[:1].upper()}{left.how[1:]}: {anomaly.headline}",
        resolution=CLOSED_OUTSIDE,
        cause=str(anomaly.symptom),
        step=-1,
        lost_steps=None,
        evicted=[],
        stages=[],
        generation=state.generation,
        resume_step=state.resume_step,
        recovered=False,
        seconds=None,
        failures=[],
    )
