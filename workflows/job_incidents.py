"""The incidents of a job: it opens each as a child workflow, lists it, and learns from its report.

The job waits for an incident that may stop it. A fault with which the job continues is only recorded, by an incident
that does nothing else. If the rules of eviction want the faulty machine to leave, the job's next incident evicts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.act.evict.plan_evictions import EvictFacts, plan_evictions
    from everstep.decisions.act.recover.incident_state import IncidentPage, IncidentState
    from everstep.decisions.act.recover.tried_rungs import TriedRungs
    from everstep.decisions.act.versions.book import VersionBook
    from everstep.decisions.blame.alerts import alerts_kept, is_alert
    from everstep.decisions.detect.machine_fault import operator_anomaly, without
    from everstep.model.finding import Health
    from everstep.model.incident import STILL_RUNNING, Anomaly, IncidentReport, Left, Symptom
    from everstep.model.job_state import IncidentSummary, JobState, incident_workflow_id
    from everstep.model.launch import Launched
    from everstep.model.pool import OperatorMove
    from everstep.model.stage import Stage
    from workflows import attributes, web_ui
    from workflows.closed_incident import Reopening, substitute_report
    from workflows.first_step import FirstStepWatch
    from workflows.incident.workflow import IncidentWorkflow
    from workflows.learned import learn
    from workflows.ledger_entries import Closings
    from workflows.start_activity import TASK_TIMEOUT
    from workflows.updates import Updates

INCIDENTS_KEPT = 20
"""The largest number of incidents in the job's list."""
AGAIN_S = 3600.0
"""A fault of the same part is recorded again only after this time, seconds."""
SLOW = "the job is slow"
"""The key of a vote for a slow machine among the recorded faults."""
MOST_WAITING = 32
"""The largest number of faults that wait to be recorded; more would add nothing."""
RECORDED_KEPT = 200
"""The number of recorded faults that are remembered."""

Child = workflow.ChildWorkflowHandle[IncidentWorkflow, IncidentReport]


class JobIncidents:
    """Opens the incidents of a job that may stop it, one after the other.

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
        """The generation of the open incident, or else of the last incident in this run of the workflow."""
        self.closings = Closings()
        self.reopening = Reopening(state, next_event, self.closings)
        self.observed = ObservedFaults(state, self)

    def is_open(self, number: object) -> bool:
        """Return whether the incident with a number is open."""
        return any(incident.number == number and not incident.resolution for incident in self._state.incidents)

    def note_stage(self, number: object, stage: str) -> bool:
        """Note the stage of an incident; returns whether that incident is open."""
        if not self.is_open(number):
            return False
        self._change(number, lambda incident: incident.model_copy(update={"stage": stage}))
        return True

    async def handle(self, anomaly: Anomaly) -> IncidentReport:
        """Open an incident and wait for its report."""
        state = self._state
        if goes_on := anomaly.symptom in STILL_RUNNING:
            self.observed.goes_on = True
        else:
            self._leave(anomaly.generation)
        state.status = "recovering"
        versions = state.versions
        number, opened_ns, child = await self.open(anomaly)
        self._updates.incident_opened(child, versions)
        helpers = [asyncio.create_task(self._abandon_on_stop(child))]
        if anomaly.symptom is Symptom.SLOW:
            helpers.append(asyncio.create_task(self._overtake(child)))
        try:
            report = await self._end_of(child)
        except ChildWorkflowError as error:
            if self._next_event() != "stop":
                closed = await self.reopening.closed(number, anomaly, opened_ns)
                if closed is not None:
                    return await self._take_over(number, anomaly, *closed)
            report = lost_report(anomaly, state.generation, error)
        finally:
            for helper in helpers:
                helper.cancel()
            self.observed.goes_on = False
            self._updates.incident_closed()
        if goes_on and report.generation != anomaly.generation:
            self._leave(anomaly.generation)
        wait_for_step = learn(state, report)
        self.reopening.over()
        if wait_for_step:
            self._first_step.expect()
        self.close(number, opened_ns, anomaly, report)
        return report

    async def open(self, anomaly: Anomaly, *, only_tells: bool = False) -> tuple[int, int, Child]:
        """Start an incident; returns its number, the time of its opening in nanoseconds, and its workflow.

        Args:
            anomaly: The anomaly that opens the incident.
            only_tells: The incident only records the fault, and the job continues whatever the result is.
        """
        state = self._state
        while True:
            state.incident_count += 1
            number = state.incident_count
            summary = IncidentSummary(
                id=incident_workflow_id(state.spec.name, number),
                number=number,
                headline=anomaly.headline,
                opened_ns=anomaly.seen_ns,
                stage=Stage.VOTE if anomaly.symptom is Symptom.SLOW else "",
            )
            state.incidents = [*state.incidents, summary][-INCIDENTS_KEPT:]
            self._show()
            opened_ns = workflow.time_ns()
            try:
                return number, opened_ns, await _start(state, number, anomaly, only_tells=only_tells)
            except WorkflowAlreadyStartedError:
                # This number belongs to an incident of an earlier job of the same name, which was terminated.
                state.incidents = [incident for incident in state.incidents if incident.number != number]

    def close(self, number: int, opened_ns: int, anomaly: Anomaly, report: IncidentReport) -> None:
        """Close an incident in the list, and in the ledger if the incident could not do that itself."""
        self._sum_up(number, report)
        if report.unwritten:
            name = self._state.spec.name
            incident = incident_workflow_id(name, number)
            self.closings.write(name, incident, anomaly, opened_ns, report, position=report.unwritten)

    def _leave(self, generation: int) -> None:
        """Note that an incident ends a generation: its first step and its pending faults are not awaited any more."""
        self.handled_generation, self._state.observed = generation, []  # the incident's stop collects pending faults
        self._first_step.leave()

    async def _end_of(self, child: Child) -> IncidentReport:
        """Wait for an incident's report.

        If the job is cancelled, Temporal would cancel the child too. If the child ended at the same moment, the job's
        workflow task would fail for ever. So the job does not cancel the incident, but informs it of the job's end.
        """
        try:
            return await asyncio.shield(child)
        except asyncio.CancelledError:
            self._next_event()
            return await child

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
        """Wait for an event that ends the ranks, and then end the incident that looks for a slow machine."""
        await workflow.wait_condition(lambda: self._next_event() in {"anomaly", "finished"})
        why = "another fault was reported" if self._next_event() == "anomaly" else "the job is done"
        await child.signal("overtaken", why)

    def _sum_up(self, number: int, report: IncidentReport) -> None:
        self._change(number, lambda incident: incident.closed(report))
        self._show()

    def _change(self, number: object, change: Callable[[IncidentSummary], IncidentSummary]) -> None:
        """Change the line of one incident in the list."""
        incidents = self._state.incidents
        self._state.incidents = [change(incident) if incident.number == number else incident for incident in incidents]


class ObservedFaults:
    """The faults with which a job continues.

    Args:
        state: The job's state, which is changed.
        incidents: Opens and closes the incidents that record the faults.
    """

    def __init__(self, state: JobState, incidents: JobIncidents) -> None:
        self._state = state
        self._incidents = incidents
        self.goes_on = False
        """Whether the job continues although an incident is open."""
        self._recording: set[asyncio.Task[None]] = set()

    def accept(self, anomaly: Anomaly) -> str:
        """Accept a fault; returns what is done with it, as text."""
        state, now_ns = self._state, workflow.time_ns()
        state.alerts = alerts_kept(state.alerts, anomaly.findings, now_ns)
        # The stop of an open incident asks the machines for all findings before the generation that it launches.
        is_collected = anomaly.symptom is Symptom.SLOW or anomaly.generation <= state.generation
        if state.status not in {"starting", "running"} and not self.goes_on and is_collected:
            return "an incident is open, and asks the machines itself"
        if anomaly.symptom is Symptom.SLOW:
            return self._accept_slow(anomaly, now_ns)
        recent = {about for about, at_ns in state.observed_told.items() if now_ns - at_ns < AGAIN_S * 1e9}
        alerts = [found for found in anomaly.findings if is_alert(found.finding)]
        began_again = any(found.finding.since_ns > state.observed_told.get(found.about, 0) for found in alerts)
        leaves = began_again and self._is_to_leave(anomaly)
        new = anomaly if leaves else without(anomaly, recent)
        if new is None:
            return "already reported"
        if not leaves and all(found.finding.verdict is not Health.FAULTY for found in new.findings):
            self._remember({found.about: now_ns for found in new.findings})
            return "noted: one network alert is tolerated"
        if len(state.observed) >= MOST_WAITING:
            return f"not recorded: {MOST_WAITING} other faults wait to be recorded"
        self._remember({found.about: now_ns for found in new.findings})
        state.observed.append(new)
        return "accepted"

    def _accept_slow(self, anomaly: Anomaly, now_ns: int) -> str:
        """Accept that the job is slow, but not too often, because the search for the machine costs the ranks time."""
        state = self._state
        last_ns = state.observed_told.get(SLOW)
        if anomaly.generation != state.generation:
            return f"generation {anomaly.generation} is over"
        if last_ns is not None and now_ns - last_ns < state.spec.policy.slow.again_after_s * 1e9:
            return "already reported"
        self._remember({SLOW: now_ns})
        state.observed.append(anomaly)
        return "accepted"

    def _remember(self, accepted_ns: dict[str, int]) -> None:
        """Note when faults were accepted, and forget the oldest."""
        newest = sorted({**self._state.observed_told, **accepted_ns}.items(), key=lambda entry: entry[1])
        self._state.observed_told = dict(newest[-RECORDED_KEPT:])

    def accept_move(self, move: OperatorMove) -> None:
        """Accept an operator's request to evict a machine, unless the job does not have it or handles it already."""
        state = self._state
        waiting = {name for anomaly in (*state.observed, *state.pending) for name in anomaly.machines}
        ours = move.machine in {machine.name for machine in state.machines}
        if state.status == "running" and ours and move.machine not in waiting:
            state.observed.append(operator_anomaly(move, state.generation, workflow.time_ns()))

    def _is_to_leave(self, anomaly: Anomaly) -> bool:
        """Return whether the rules of eviction want a machine to leave because of this fault."""
        state = self._state
        facts = EvictFacts(
            now_ns=workflow.time_ns(),
            machines=[machine.name for machine in state.machines],
            findings=anomaly.findings,
            alike=anomaly.alike,
            earlier=state.alerts,
            evicted_ns=state.evicted_ns,
            stopped=False,
        )
        return bool(plan_evictions(facts, state.spec.policy).evict)

    @property
    def due(self) -> bool:
        """Whether a fault can be recorded now."""
        return bool(self._state.observed) and self._state.status == "running"

    @property
    def under_way(self) -> bool:
        """Whether an incident that records a fault is open."""
        return bool(self._recording)

    def begin(self) -> None:
        """Open the incidents of all faults that wait, and do not wait for the end of these incidents.

        Faults of a machine that must leave, and of a slow job, become incidents that the job itself waits for.
        """
        waiting, self._state.observed = self._state.observed, []
        here = {machine.name for machine in self._state.machines}
        for anomaly in waiting:
            if anomaly.findings and here.isdisjoint(found.machine for found in anomaly.findings):
                continue  # the machines have left meanwhile
            is_slow = anomaly.symptom is Symptom.SLOW
            if is_slow or self._is_to_leave(anomaly):
                self._state.pending.append(anomaly.model_copy(update={"generation": self._state.generation}))
                continue
            task = asyncio.create_task(self._record(anomaly), name="observed fault")
            self._recording.add(task)
            task.add_done_callback(self._recording.discard)

    async def all_recorded(self) -> None:
        """Wait until all open incidents are closed."""
        await asyncio.gather(*self._recording, return_exceptions=True)

    async def _record(self, anomaly: Anomaly) -> None:
        number, opened_ns, child = await self._incidents.open(anomaly, only_tells=True)
        try:
            report = await child
        except ChildWorkflowError as error:
            report = lost_report(anomaly, self._state.generation, error)
        self._incidents.close(number, opened_ns, anomaly, report)


async def _start(state: JobState, number: int, anomaly: Anomaly, *, only_tells: bool) -> Child:
    """Start the workflow of an incident.

    Raises:
        WorkflowAlreadyStartedError: an incident with this number is open.
    """
    opened = IncidentState(
        number=number,
        anomaly=anomaly,
        opened_ns=workflow.time_ns(),
        spec=state.spec,
        machines=state.machines,
        run=state.run,
        origin_runs=state.origin_runs,
        first_step_s=state.first_step_s,
        alerts=state.alerts,
        evicted_ns=state.evicted_ns,
        only_tells=only_tells,
        generation=state.generation,
        resume_step=state.resume_step,
        save_every=state.save_every,
        lineage=state.lineage,
        folder=state.resume_path,
        folder_step=state.resume_path_step,
        emptied=set(state.emptied),
        showing=state.showing,
        history=state.failures,
        hold=state.hold,
        book=VersionBook.of([] if only_tells else state.versions, state.spec.version),
        ladder=TriedRungs(remembered=state.tried),
        page=IncidentPage(headline=anomaly.headline),
    )
    return await workflow.start_child_workflow(
        IncidentWorkflow.run,
        opened,
        id=incident_workflow_id(state.spec.name, number),
        task_timeout=TASK_TIMEOUT,
        static_summary=web_ui.incident_title(number, anomaly),
        search_attributes=attributes.search_attributes(
            {
                attributes.JOB_NAME: state.spec.name,
                attributes.SYMPTOM: str(anomaly.symptom),
                attributes.STAGE: "open",
                attributes.SEVERITY: "info",
            }
        ),
    )


def lost_report(anomaly: Anomaly, generation: int, error: ChildWorkflowError) -> IncidentReport:
    """Return a report in place of the report of an incident that was ended from outside, e.g. in the Web UI."""
    headline = f"Incident ended from outside ({error.cause or error}): {anomaly.headline}"
    return substitute_report(anomaly, headline, "abandoned", generation)
