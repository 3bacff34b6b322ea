"""The job: a workflow that lives as long as its training.

It launches the first generation, receives the watchers' reports, opens one incident after the other, and keeps its
whole state across continue-as-new.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.agents.release_machines import ReleaseMachines
    from activities.agents.stop_ranks import StopRanks
    from activities.ledger.records import NumbersUsed
    from activities.pool.requests import GiveMachinesBack
    from everstep.base.text import listed
    from everstep.decisions.keep.lineage import FROM_NOTHING, extended
    from everstep.model.incident import CLOSED_OUTSIDE, STILL_RUNNING, Anomaly, Symptom
    from everstep.model.job_state import JobState, ShareTrained
    from everstep.model.launch import Launched
    from everstep.model.machine import Machine
    from everstep.model.pool import GiveBack, OperatorMove
    from everstep.model.run_id import run_id
    from everstep.model.stage import Stage
    from everstep.model.version import JobVersion, read_update
    from workflows import attributes, web_ui
    from workflows.first_launch import CannotStart, FirstLaunch
    from workflows.first_step import FirstStepWatch, suspect
    from workflows.job_incidents import JobIncidents
    from workflows.learned import change_machines, ended_with_job, learn_versions
    from workflows.ledger_entries import VersionNotes, record
    from workflows.messages import (
        JobResult,
        OperatorRequest,
        check_generation,
        check_report,
        check_trained,
        read_list,
        read_request,
    )
    from workflows.start_activity import TASK_TIMEOUT, start_activity
    from workflows.updates import Updates

REJECTED_KEPT = 10
UPDATE_JSON = '{"code": "/home/ada/gpt", "urgency": "lazy", "operator": "ada", "reason": "why"}'
STAGE_CHARACTERS = 120


@workflow.defn(name="Job")
class JobWorkflow:
    """A training job."""

    @workflow.init
    def __init__(self, state: JobState) -> None:
        self.state = state
        self.finished_generations: set[int] = set()
        self.first_step = FirstStepWatch(state, self._has_work)
        self.updates = Updates(state, self._show)
        self.version_notes = VersionNotes(state)
        self.incidents = JobIncidents(
            state,
            self.first_step,
            self.updates,
            next_event=self._next_event,
            confirm=self._confirm,
            show=self._show,
        )
        self.observed = self.incidents.observed
        self.records: list[workflow.ActivityHandle[NumbersUsed]] = []

    # Reports of watchers, and requests of operators.

    @workflow.update(name="report", description="A watcher reports an anomaly")
    def report(self, anomaly: Anomaly) -> str:
        """Accept an anomaly; a repeated or outdated one changes nothing."""
        self._catch_up(anomaly.generation)
        handled = {pending.generation for pending in self.state.pending if pending.symptom not in STILL_RUNNING}
        handled.add(self.incidents.handled_generation)
        if anomaly.generation < self.state.generation or anomaly.generation in handled:
            return f"the end of generation {anomaly.generation} is handled already"
        # The anomaly is kept even while an incident is open: it may be about a generation that the incident launched.
        self.state.pending.append(anomaly)
        return f"accepted for generation {anomaly.generation}"

    @workflow.update(name="observe", description="A watcher reports a fault with which the job continues")
    def observe(self, anomaly: Anomaly) -> str:
        """Accept a fault with which the job continues."""
        self._catch_up(anomaly.generation)
        return self.observed.accept(anomaly)

    @workflow.update(name="finished", description="A watcher reports that all ranks ended with success")
    def finished(self, generation: int) -> str:
        """Accept the end of the training."""
        self._catch_up(generation)
        self.finished_generations.add(generation)
        return f"accepted for generation {generation}"

    @workflow.update(name="trained", description="A worker reports the share of its time in which the job trained")
    def trained(self, share: ShareTrained) -> str:
        """Show the share of time in which the job trained; an equal share changes nothing."""
        self.state.ettr, self.state.ettr_last_hour = share.ettr, share.last_hour
        self._show()
        return "shown"

    @trained.validator
    def check_trained(self, share: ShareTrained) -> None:
        """Refuse a share that is shown already: all workers send it."""
        check_trained(self.state, share)

    @report.validator
    def check_report(self, anomaly: Anomaly) -> None:
        """Refuse a report with an invalid generation, or one that is too early.

        A refused update leaves no trace, so the watcher may send it again with the same id.
        """
        check_report(self.state, anomaly)

    @finished.validator
    def check_finished(self, generation: int) -> None:
        """Refuse an invalid generation."""
        check_generation(generation)

    @workflow.signal(name="stop", description='Stop the job for good. {"operator": "you", "note": "why"}')
    def stop(self, request: Any = None, *more: Any) -> None:
        """Stop the job in an orderly way."""
        read = read_request(OperatorRequest, request, *more)
        if isinstance(read, str):
            self._reject(f"stop: {read}")
        else:
            self.state.stop_requested = read.operator + (f" ({read.note})" if read.note else "")

    @workflow.signal(name="evict", description='Replace a machine of the job. {"machine": "m3", "operator": "you"}')
    def evict(self, request: Any = None, *more: Any) -> None:
        """Evict a machine once a replacement is ready; the pool repeats the request while the machine is in the job."""
        read = read_request(OperatorMove, request, *more)
        if isinstance(read, str):
            self._reject(f"evict: {read}")
        else:
            self.observed.accept_move(read)

    @workflow.signal(name="update", description=f"Run another version of its code. {UPDATE_JSON}")
    def update_by_signal(self, request: Any = None, *more: Any) -> None:
        """Request another version of the code; an invalid request is shown on the page."""
        try:
            self.updates.accept(read_update(request, *more))
        except ValueError as refused:
            self._reject(f"update: {refused}")

    @workflow.update(name="update", description=f"As the signal; the answer says what is done. {UPDATE_JSON}")
    def update(self, request: Any = None, *more: Any) -> str:
        """Request another version of the code; returns what is done, as text."""
        return self.updates.accept(read_update(request, *more))

    @update.validator
    def check_update(self, request: Any = None, *more: Any) -> None:
        """Refuse an impossible request; a refused update leaves no trace."""
        self.updates.check(read_update(request, *more))

    @workflow.signal(name="incident_versions", description="Sent by the job's own incidents")
    def incident_versions(self, number: Any = 0, versions: Any = None, *more: Any) -> None:
        """Note which version of the code an incident will launch."""
        if self.incidents.is_open(number) and (read := read_list(JobVersion, versions)):
            learn_versions(
                self.state, read, next((version.number for version in read if version.status == "running"), 0)
            )
        self._show()

    @workflow.signal(name="incident_stage", description="Sent by the job's own incidents")
    def incident_stage(self, number: Any = 0, stage: Any = "", *more: Any) -> None:
        """Note that an incident was parked or resumed."""
        if not isinstance(stage, str) or len(stage) > STAGE_CHARACTERS:
            return
        if self.incidents.note_stage(number, stage):
            self.state.status = "parked" if stage == Stage.PARKED else "recovering"
        self._show()

    @workflow.signal(name="incident_machines", description="Sent by the job's own incidents")
    def incident_machines(self, number: Any = 0, machines: Any = None, *more: Any) -> None:
        """Note the machines on which an incident continues."""
        if self.incidents.is_open(number) and (read := read_list(Machine, machines)):
            change_machines(self.state, read)
        self._show()

    @workflow.query(name="state", description="The complete state of the job")
    def current_state(self) -> JobState:
        """Return the job's state."""
        return self.state

    # The life of the job.

    @workflow.run
    async def run(self, state: JobState) -> JobResult:
        """Run until the training is over, stopped or given up."""
        self._show()
        self.updates.resume()
        try:
            return await asyncio.create_task(self._live(), name="job flow")
        except asyncio.CancelledError:
            self.state.stop_requested = "cancellation"
            return await asyncio.shield(self._stopped())

    async def _live(self) -> JobResult:
        if self.state.generation == 0 and (ended := await self._begin()):
            return ended
        while True:
            while self.first_step.due and not self._has_work():
                await self._confirm()
            await workflow.wait_condition(self._has_work)
            match self._next_event():
                case "stop":
                    return await self._stopped()
                case "finished":
                    return await self._end(
                        "finished", f"finished after {web_ui.count(len(self.state.incidents), 'incident')}"
                    )
                case "anomaly":
                    if ended := await self._attend():
                        return ended
                case "update":
                    self.state.pending.append(self.updates.anomaly())
                case "observed":
                    self.observed.begin()
                case _:
                    # There must be no await between this check and the end of the run: a report could be lost.
                    await workflow.wait_condition(workflow.all_handlers_finished)
                    if self._next_event() == "":
                        workflow.continue_as_new(self.state, task_timeout=TASK_TIMEOUT)

    async def _attend(self) -> JobResult | None:
        """Open the next incident; returns the job's result if the incident did not recover the job."""
        if self.state.closed_outside:
            await self._pause()
            if self._next_event() != "anomaly":
                return None
        report = await self.incidents.handle(self._next_anomaly())
        if report.recovered or report.resolution == CLOSED_OUTSIDE:
            return None
        if self._next_event() == "stop":
            return await self._stopped()
        return await self._end("failed", report.headline)

    async def _pause(self) -> None:
        """Wait before the next incident of a fault whose last incident was closed from outside."""
        if self._should_continue_as_new() and self.state.generation not in self.finished_generations:
            await workflow.wait_condition(workflow.all_handlers_finished)
            workflow.continue_as_new(self.state, task_timeout=TASK_TIMEOUT)
        if self.state.closed_outside > 1:
            await self.incidents.reopening.pause()

    def _has_work(self) -> bool:
        """Return whether the job has to do something now."""
        return self._next_event() != "" or self._should_continue_as_new()

    def _next_event(self) -> str:
        self.state.pending = [anomaly for anomaly in self.state.pending if anomaly.generation >= self.state.generation]
        # If the job is cancelled while it waits for an activity or a child, it gets an error of that activity or child
        # instead of a CancelledError. So the cancellation is noticed here.
        if workflow.cancellation_reason() is not None:
            self.state.stop_requested = self.state.stop_requested or "cancellation"
        if self.state.stop_requested:
            return "stop"
        if any(anomaly.generation == self.state.generation for anomaly in self.state.pending):
            return "anomaly"
        if self.state.generation in self.finished_generations:
            return "finished"
        if self.updates.due:
            return "update"
        return "observed" if self.observed.due else ""

    def _should_continue_as_new(self) -> bool:
        info = workflow.info()
        if self.incidents.closings.pending or self.observed.under_way or self.updates.under_way:
            return False
        if self.version_notes.under_way:
            return False
        return info.is_continue_as_new_suggested() or info.is_target_worker_deployment_version_changed()

    def _next_anomaly(self) -> Anomaly:
        """Return the anomaly of the next incident; ends of ranks come before faulty machines."""
        due = [pending for pending in self.state.pending if pending.generation == self.state.generation]
        anomaly = min(due, key=lambda anomaly: anomaly.symptom in STILL_RUNNING)
        self.state.pending.remove(anomaly)
        return anomaly

    async def _begin(self) -> JobResult | None:
        """Start the job, unless an operator stops it before it runs; returns its result if it is over already."""
        starting = asyncio.create_task(self._start())
        try:
            await workflow.wait_condition(lambda: starting.done() or bool(self.state.stop_requested))
        except asyncio.CancelledError:
            await _ended(starting)
            raise
        is_done = starting.done()
        await _ended(starting)
        if not is_done:
            return await self._stopped()
        try:
            starting.result()
        except CannotStart as refused:
            return await self._end("failed", f"was not started: {refused}")
        return None

    async def _start(self) -> None:
        """Launch the first generation; a failure opens an incident like any other anomaly.

        Raises:
            CannotStart: the job cannot start as requested.
        """
        state = self.state
        state.started_ns = workflow.time_ns()
        state.run = run_id(state.started_ns, workflow.info().first_execution_run_id)
        try:
            used = await record(self.state, started_ns=state.started_ns)
            # The numbers continue from earlier runs of the same name, so an agent never gets a generation twice.
            state.generation, state.incident_count = used.generations, used.incidents
            state.incidents_before = used.incidents
        except ActivityError as error:
            if is_cancelled_exception(error):  # the job is stopped, and must not continue to start
                raise
            workflow.logger.warning("the ledger did not answer; the job starts without it")
        first = FirstLaunch(state)
        await first.check()
        first.count()
        self.version_notes.first_launch(noted=True)
        try:
            launched = await first.launch()
        except ActivityError as error:
            self.version_notes.first_launch(noted=False)
            suspect(state, Symptom.LAUNCH_FAILED, str(error.cause or error)[:200])
        else:
            state.backups = launched.backups
            self.first_step.expect()
            await self._confirm(launched)

    async def _confirm(self, launched: Launched | None = None) -> None:
        """Wait for the newest generation's first step; ``launched`` is only set after the job's first launch."""
        over, confirmation = await self.first_step.ask(launched)
        if over:
            self._show()
            if launched:
                versions = self.state.versions
                self.records.append(record(self.state, launched=launched, confirmation=confirmation, versions=versions))
            await self.first_step.back_off()

    async def _stopped(self) -> JobResult:
        self.state.status = "stopping"
        self._show()
        silent = await self._stop_ranks()
        later = "ranks may run there, and are ended once its agent answers again"
        left = f"; {silent} did not answer: {later}" if silent else ""
        return await self._end("stopped", f"stopped by {self.state.stop_requested}{left}")

    async def _stop_ranks(self) -> str:
        """Stop all ranks, with the policy's time to end; returns the machines that did not answer, as text."""
        state = self.state
        stop = StopRanks(
            job=state.placed,
            generation=state.generation,
            why=f"stop requested by {state.stop_requested}",
            grace_s=state.spec.policy.stop.grace_s,
            patience_s=5.0,
        )
        with contextlib.suppress(ActivityError):  # the release of the machines ends the other ranks
            return listed((await start_activity(stop)).unreachable, 3)
        return ""

    async def _leave(self) -> None:
        """Release what the job has on its machines, and then give back the machines."""
        try:
            await start_activity(ReleaseMachines(job=self.state.placed))
        finally:
            request = GiveBack(job=self.state.spec.name, run=self.state.run)
            await start_activity(GiveMachinesBack(request=request))

    async def _end(self, status: str, outcome: str) -> JobResult:
        """Release the machines and write the last entries of the ledger."""
        state = self.state
        state.status, state.outcome = status, outcome  # type: ignore[assignment]  # one of JobStatus
        state.versions = ended_with_job(state)
        self._show()
        if self.observed.under_way:
            await self.observed.all_recorded()
        written, *_ = await asyncio.gather(
            record(state, versions=state.versions),
            self._leave(),
            *self.records,
            *self.incidents.closings.again(),
            return_exceptions=True,
        )
        if isinstance(written, NumbersUsed) and written.ettr is not None:
            state.ettr, state.ettr_last_hour = written.ettr, written.ettr_last_hour
            self._show()
        await workflow.wait_condition(workflow.all_handlers_finished)
        return JobResult(
            headline=f"{state.spec.name} {outcome}",
            outcome=status,
            generations=state.generation,
            incidents=[incident.headline for incident in state.incidents],
        )

    def _catch_up(self, generation: int) -> None:
        """Accept that a newer generation runs than this workflow launched.

        This happens after a reset of the workflow to an earlier event, or if Temporal's database was restored from a
        backup. While no incident is open, nothing else launches generations.
        """
        state = self.state
        if state.status != "running" or generation <= state.generation:
            return
        workflow.logger.warning(f"generation {generation} runs, and this history ends with {state.generation}")
        state.generation, state.resume_step = generation, FROM_NOTHING
        # It is not known at which steps the missing generations began. So only copies of the newest one are used.
        state.lineage = extended(state.lineage, [(generation, FROM_NOTHING)])
        # Each missing generation may be that of an incident, whose number must not be used again.
        state.incident_count = max(state.incident_count, generation - 1)
        self._show()

    def _reject(self, text: str) -> None:
        """Show that a message was invalid."""
        self.state.rejected = [*self.state.rejected, text][-REJECTED_KEPT:]
        self._show()

    def _show(self) -> None:
        workflow.set_current_details(web_ui.job_page(self.state, workflow.info().namespace))
        workflow.upsert_search_attributes(attributes.updates(attributes.of_job(self.state)))
        self.version_notes.write_changes()


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task, and wait for its end. This must not run in a ``finally``, because a workflow that is evicted from
    the cache may not wait."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
