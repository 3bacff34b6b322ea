"""The incidents of a job: each is a child of the job, and the job learns from its report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from everstep.model.incident import STILL_RUNNING, Anomaly, IncidentReport, Left, Symptom
    from everstep.model.job_state import JobState, incident_workflow_id
    from everstep.model.launch import Launched
    from workflows import incident_list
    from workflows.child_incident import Child, end_of, open_incident
    from workflows.closed_incident import Reopening
    from workflows.first_step import FirstStepWatch
    from workflows.incident.report import Closings
    from workflows.learned import learn
    from workflows.messages import lost_incident
    from workflows.observed import ObservedFaults
    from workflows.updates import Updates


class JobIncidents:
    """Opens the incidents of a job one after the other.

    Args:
        state: The job's state, which is changed.
        first_step: Waits for the first step of a generation that no incident waits for.
        updates: The updates of the job's code: an incident includes those that are pending.
        next_event: Returns what the job must do next.
        confirm: Waits for the first step of a generation whose incident was closed from outside.
        show: Updates the job's page.
    """

    def __init__(
        self,
        state: JobState,
        first_step: FirstStepWatch,
        updates: Updates,
        *,
        next_event: Callable[[], str],
        confirm: Callable[[Launched], Awaitable[None]],
        show: Callable[[], None],
    ) -> None:
        self._state = state
        self._first_step = first_step
        self._updates = updates
        self._next_event = next_event
        self._confirm = confirm
        self._show = show
        self.handled_generation = 0
        """The generation of the incident that is open, or was the last of this run."""
        self.closings = Closings()
        self.reopening = Reopening(state, next_event, self.closings)
        self.observed = ObservedFaults(state, self._note_opened, self._close)

    async def handle(self, anomaly: Anomaly) -> IncidentReport:
        """Open an incident and wait for its report."""
        state = self._state
        if goes_on := anomaly.symptom in STILL_RUNNING:
            self.observed.goes_on = True
        else:
            self._leave(anomaly.generation)
        state.status = "recovering"
        while True:
            number = self._note_opened(anomaly)
            opened_ns = workflow.time_ns()
            try:
                child = await open_incident(state, number, anomaly)
                break
            except WorkflowAlreadyStartedError:
                # This incident belongs to an earlier run of the name, whose job was terminated; it ends soon.
                state.incidents = [summary for summary in state.incidents if summary.number != number]
        self._updates.incident = child
        helpers = [asyncio.create_task(self._abandon_on_stop(child))]
        if anomaly.symptom is Symptom.SLOW:
            helpers.append(asyncio.create_task(self._overtake(child)))
        try:
            report = await end_of(child, cancelled=self._next_event)
        except ChildWorkflowError as error:
            if self._next_event() != "stop":
                closed = await self.reopening.closed(number, anomaly, opened_ns)
                if closed is not None:
                    return await self._take_over(number, anomaly, *closed)
            report = lost_incident(anomaly, state.generation, str(error.cause or error))
        finally:
            for helper in helpers:
                helper.cancel()
            self.observed.goes_on = False
            self._updates.incident = None
        if goes_on and report.generation != anomaly.generation:
            self._leave(anomaly.generation)
        self._learn(report)
        self._close(number, opened_ns, anomaly, report)
        return report

    def _leave(self, generation: int) -> None:
        """Note that an incident ends a generation: its first step and its pending faults are not awaited any more."""
        self.handled_generation, self._state.observed = generation, []  # its stop collects pending faults
        self._first_step.leave()

    def _close(self, number: int, opened_ns: int, anomaly: Anomaly, report: IncidentReport) -> None:
        """Close an incident in the list, and in the ledger if the incident could not do that itself."""
        self._sum_up(number, report)
        if report.unwritten:
            name = self._state.spec.name
            incident = incident_workflow_id(name, number)
            self.closings.write(name, incident, anomaly, opened_ns, report, position=report.unwritten)

    def _note_opened(self, anomaly: Anomaly) -> int:
        number = incident_list.opened(self._state, anomaly)
        self._show()
        return number

    async def _take_over(self, number: int, anomaly: Anomaly, left: Left, report: IncidentReport) -> IncidentReport:
        """Take over after an incident that was closed from outside: continue with its launch, or open its fault
        again."""
        self._sum_up(number, report)
        if left.launched is None:
            self.reopening.reopen(number, anomaly, left)
        else:
            self.reopening.over()
            self._first_step.expect()
            await self._confirm(left.launched)
        return report

    async def _abandon_on_stop(self, child: Child) -> None:
        await workflow.wait_condition(lambda: self._state.stop_requested != "")
        await child.signal("abandon", {"operator": self._state.stop_requested[:100], "note": "the job is stopped"})

    async def _overtake(self, child: Child) -> None:
        """End an incident that looks for a slow machine when an event ends the ranks."""
        await workflow.wait_condition(lambda: self._next_event() in {"anomaly", "finished"})
        why = "something else happened to the job" if self._next_event() == "anomaly" else "the job is done"
        await child.signal("overtaken", why)

    def _learn(self, report: IncidentReport) -> None:
        wait_for_step = learn(self._state, report)
        self.reopening.over()
        if wait_for_step:
            self._first_step.expect()

    def _sum_up(self, number: int, report: IncidentReport) -> None:
        incident_list.closed(self._state, number, report)
        self._show()
