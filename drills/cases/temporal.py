"""Temporal in simulated time: it runs workflows in this process, without a server and without a clock.

The workflows are the real ones, run by the SDK's own runner for workflows. What a Temporal server does between two
tasks of a workflow is done here: timers, activities, child workflows, signals, updates and continue-as-new. The time
only advances when no workflow has anything to do, so an hour of an incident takes milliseconds.

An activity is an object with the name and the input. The code that simulates the machines completes it, at once or
later (:class:`ActivityCall`). Nothing here fails by itself: no task times out, and no worker dies. Drills test these
faults.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import temporalio.workflow
from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.common.v1 import ActivityType, Payload, Payloads
from temporalio.api.enums.v1 import TimeoutType
from temporalio.api.failure.v1 import (
    ActivityFailureInfo,
    ApplicationFailureInfo,
    CanceledFailureInfo,
    Failure,
    TimeoutFailureInfo,
)
from temporalio.bridge.proto.activity_result import ActivityResolution, Cancellation, Success
from temporalio.bridge.proto.activity_result import Failure as ActivityFailed
from temporalio.bridge.proto.child_workflow import ChildWorkflowResult
from temporalio.bridge.proto.child_workflow import Success as ChildSucceeded
from temporalio.bridge.proto.workflow_activation import (
    DoUpdate,
    FireTimer,
    InitializeWorkflow,
    RemoveFromCache,
    ResolveActivity,
    ResolveChildWorkflowExecution,
    ResolveChildWorkflowExecutionStart,
    ResolveChildWorkflowExecutionStartSuccess,
    ResolveSignalExternalWorkflow,
    SignalWorkflow,
    WorkflowActivation,
    WorkflowActivationJob,
)
from temporalio.bridge.proto.workflow_commands import WorkflowCommand
from temporalio.common import Priority, TypedSearchAttributes
from temporalio.converter import DefaultFailureConverter
from temporalio.worker import UnsandboxedWorkflowRunner, WorkflowInstance, WorkflowInstanceDetails

from activities.activity import Activity
from activities.payloads import DATA_CONVERTER

NAMESPACE = "simulated"
TASK_QUEUE = "simulated"
S = 1_000_000_000
"""A second in nanoseconds."""


class WorkflowFailedError(Exception):
    """A workflow failed, or its code raised an error; the message has its id and the error."""


class UpdateRefusedError(Exception):
    """A workflow refused an update, or its handler raised an error; the message is the workflow's."""


@dataclass(eq=False)
class ActivityCall:
    """An activity that a workflow has started; it is completed or failed once, now or at a later time."""

    request: Activity[Any]
    workflow_id: str
    started_ns: int
    _resolve: Callable[[ActivityResolution], None]
    done: bool = False
    """The workflow has the result, or does not wait for it any more."""

    def complete(self, result: Any) -> None:
        """Complete the activity; a call that is done already changes nothing."""
        [payload] = _encoded([result])
        self._end(ActivityResolution(completed=Success(result=payload)))

    def fail(self, message: str, kind: str = "") -> None:
        """Fail the activity for good; a call that is done already changes nothing."""
        cause = Failure(message=message, application_failure_info=ApplicationFailureInfo(type=kind, non_retryable=True))
        self._end(ActivityResolution(failed=ActivityFailed(failure=self._failure("Activity task failed", cause))))

    def time_out(self) -> None:
        """End the activity by a time-out."""
        info = TimeoutFailureInfo(timeout_type=TimeoutType.TIMEOUT_TYPE_SCHEDULE_TO_CLOSE)
        cause = Failure(message="activity ScheduleToClose timeout", timeout_failure_info=info)
        self._end(ActivityResolution(failed=ActivityFailed(failure=self._failure("Activity task timed out", cause))))

    def cancel(self) -> None:
        """Cancel the activity, since its workflow requested this."""
        cause = Failure(message="Cancelled", canceled_failure_info=CanceledFailureInfo())
        self._end(ActivityResolution(cancelled=Cancellation(failure=self._failure("Activity cancelled", cause))))

    def _failure(self, message: str, cause: Failure) -> Failure:
        return Failure(
            message=message,
            cause=cause,
            activity_failure_info=ActivityFailureInfo(
                activity_type=ActivityType(name=self.request.name), activity_id="1"
            ),
        )

    def _end(self, resolution: ActivityResolution) -> None:
        if not self.done:
            self.done = True
            self._resolve(resolution)


@dataclass(eq=False)
class _SimulatedRun:
    """A workflow that runs."""

    id: str
    run_id: str
    definition: Any
    instance: WorkflowInstance
    parent: tuple[str, int] | None
    """The id of the parent workflow, and the number under which it started this one."""
    jobs: list[WorkflowActivationJob] = field(default_factory=list)
    timers: set[int] = field(default_factory=set)
    calls: dict[int, ActivityCall] = field(default_factory=dict)
    updates: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    events: int = 0
    result: Payload | None = None
    closed: bool = False


Perform = Callable[[ActivityCall], None]


class SimulatedTemporal:
    """Runs workflows in simulated time.

    Args:
        workflows: The classes of workflows.
        activities: The classes of activities.
        perform: Begins an activity; it completes the call now or schedules that for later with :meth:`at`.
        now_ns: The time at the begin, nanoseconds.
    """

    def __init__(
        self,
        workflows: Sequence[type],
        activities: Sequence[type[Activity[Any]]],
        perform: Perform,
        now_ns: int,
    ) -> None:
        definitions = [temporalio.workflow._Definition.must_from_class(one) for one in workflows]
        self._definitions = {one.name: one for one in definitions}
        self._activities = {one.name: one for one in activities}
        self._perform = perform
        self._runner = UnsandboxedWorkflowRunner()
        self._runs: dict[str, _SimulatedRun] = {}
        self._due: list[tuple[int, int, bool, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._commands: dict[str, Callable[[_SimulatedRun, Any], None]] = {
            "start_timer": self._start_timer,
            "cancel_timer": self._cancel_timer,
            "schedule_activity": self._schedule,
            "request_cancel_activity": self._cancel_activity,
            "start_child_workflow_execution": self._start_child,
            "signal_external_workflow_execution": self._signal_external,
            "update_response": self._respond,
            "complete_workflow_execution": self._close,
            "continue_as_new_workflow_execution": self._continue_as_new,
            "fail_workflow_execution": self._fail,
            "upsert_workflow_search_attributes": self._show,
            "modify_workflow_properties": self._show,
        }
        self.now_ns = now_ns
        self.suggests_continue_as_new: Callable[[str], bool] = lambda _: False
        """Whether a workflow, by its id, is advised to continue as new."""

    @property
    def now_s(self) -> float:
        """The time now, seconds."""
        return self.now_ns / S

    def at(self, after_s: float, what: Callable[[], None], *, fixed: bool = False) -> None:
        """Call a function after a time, seconds. With ``fixed``, :meth:`skip` does not delay the call."""
        heapq.heappush(self._due, (self.now_ns + round(max(after_s, 0.0) * S), next(self._numbers), fixed, what))

    def skip(self, duration_s: float) -> None:
        """Let a time pass in which nothing happens, seconds. It delays all calls that are not fixed."""
        skipped_ns = round(duration_s * S)
        self.now_ns += skipped_ns
        moved = [
            (due_ns + (0 if fixed else skipped_ns), number, fixed, what) for due_ns, number, fixed, what in self._due
        ]
        heapq.heapify(moved)
        self._due = moved

    def start(self, kind: str, workflow_id: str, *arguments: Any) -> None:
        """Start a workflow."""
        self._start(kind, workflow_id, _encoded(arguments), None)

    def signal(self, workflow_id: str, name: str, *arguments: Any) -> bool:
        """Send a signal; returns whether the workflow runs."""
        return self._signal(workflow_id, name, _encoded(arguments))

    def update(self, workflow_id: str, name: str, argument: Any, result: type, done: Callable[[Any], None]) -> None:
        """Send an update; ``done`` gets the result, or an :class:`UpdateRefusedError`, now or later."""
        run = self._open(workflow_id)
        if run is None:
            done(UpdateRefusedError(f"there is no workflow {workflow_id}"))
            return
        number = str(next(self._numbers))

        def decoded(answer: Any) -> None:
            if isinstance(answer, Payload):
                [answer] = DATA_CONVERTER.payload_converter.from_payloads([answer], [result])
            done(answer)

        run.updates[number] = decoded
        update = DoUpdate(
            id=number, protocol_instance_id=number, name=name, input=_encoded([argument]), run_validator=True
        )
        run.jobs.append(WorkflowActivationJob(do_update=update))

    def is_open(self, workflow_id: str) -> bool:
        """Whether a workflow runs."""
        return self._open(workflow_id) is not None

    def workflow(self, workflow_id: str) -> Any:
        """Return the object of a workflow's class, open or closed, to look at; it must not be changed."""
        return self._runs[workflow_id].instance._object  # type: ignore[attr-defined]

    def result(self, workflow_id: str, kind: type) -> Any:
        """Return the result of a workflow; None: it has none yet."""
        payload = self._runs[workflow_id].result
        if payload is None:
            return None
        return DATA_CONVERTER.payload_converter.from_payloads([payload], [kind])[0]

    def advance(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run until a condition holds; returns whether it held within the time limit, seconds.

        Raises:
            WorkflowFailedError: a workflow failed.
        """
        limit_ns = self.now_ns + round(limit_s * S)
        while True:
            self._settle()
            if until():
                return True
            if not self._due or self._due[0][0] > limit_ns:
                self.now_ns = limit_ns
                return False
            self.now_ns, _, _, what = heapq.heappop(self._due)
            what()

    def close(self) -> None:
        """End all workflows, as a worker does with the runs in its cache."""
        for run in self._runs.values():
            evicted = WorkflowActivationJob(remove_from_cache=RemoveFromCache(message="the simulation is over"))
            run.instance.activate(WorkflowActivation(run_id=run.run_id, jobs=[evicted]))

    # Runs of workflows.

    def _settle(self) -> None:
        while ready := [run for run in self._runs.values() if run.jobs and not run.closed]:
            for run in ready:
                self._activate(run)

    def _activate(self, run: _SimulatedRun) -> None:
        jobs, run.jobs = run.jobs, []
        run.events += 3 + len(jobs)
        activation = WorkflowActivation(
            run_id=run.run_id,
            timestamp=_timestamp(self.now_ns),
            history_length=run.events,
            continue_as_new_suggested=self.suggests_continue_as_new(run.id),
            jobs=jobs,
        )
        completion = run.instance.activate(activation)
        if completion.HasField("failed"):
            raise WorkflowFailedError(f"{run.id}: {_text(completion.failed.failure)}")
        for command in completion.successful.commands:
            self._carry_out(run, command)

    def _start(self, kind: str, workflow_id: str, arguments: Sequence[Payload], parent: tuple[str, int] | None) -> None:
        run_id = f"run-{next(self._numbers)}"
        definition = self._definitions[kind]
        now = datetime.fromtimestamp(self.now_ns / S, UTC)
        info = temporalio.workflow.Info(
            attempt=1,
            continued_run_id=None,
            cron_schedule=None,
            execution_timeout=None,
            first_execution_run_id=run_id,
            headers={},
            namespace=NAMESPACE,
            original_execution_run_id=run_id,
            parent=None,
            root=None,
            raw_memo={},
            retry_policy=None,
            run_id=run_id,
            run_timeout=None,
            search_attributes={},
            start_time=now,
            workflow_start_time=now,
            task_queue=TASK_QUEUE,
            task_timeout=timedelta(seconds=3),
            typed_search_attributes=TypedSearchAttributes.empty,
            workflow_id=workflow_id,
            workflow_type=kind,
            priority=Priority.default,
        )
        details = WorkflowInstanceDetails(
            payload_converter_factory=lambda: DATA_CONVERTER.payload_converter,
            failure_converter_class=DefaultFailureConverter,
            interceptor_classes=[],
            defn=definition,
            info=info,
            randomness_seed=next(self._numbers),
            extern_functions={},
            disable_eager_activity_execution=True,
            worker_level_failure_exception_types=[],
            patch_activation_callback=None,
            last_completion_result=Payloads(),
            last_failure=None,
        )

        async def created() -> WorkflowInstance:  # the SDK needs a running event loop for this
            return self._runner.create_instance(details)

        run = _SimulatedRun(workflow_id, run_id, definition, asyncio.run(created()), parent)
        # The SDK logs errors of activities that were cancelled and not awaited; errors of workflows are raised here.
        run.instance.set_exception_handler(lambda *_: None)  # type: ignore[attr-defined]
        begun = InitializeWorkflow(
            workflow_type=kind,
            workflow_id=workflow_id,
            arguments=arguments,
            randomness_seed=1,
            first_execution_run_id=run_id,
            attempt=1,
            start_time=_timestamp(self.now_ns),
        )
        run.jobs.append(WorkflowActivationJob(initialize_workflow=begun))
        self._runs[workflow_id] = run

    def _open(self, workflow_id: str) -> _SimulatedRun | None:
        run = self._runs.get(workflow_id)
        return run if run and not run.closed else None

    def _signal(self, workflow_id: str, name: str, arguments: Sequence[Payload]) -> bool:
        run = self._open(workflow_id)
        if run is not None:
            signal = SignalWorkflow(signal_name=name, input=arguments, originating_event_id=next(self._numbers))
            run.jobs.append(WorkflowActivationJob(signal_workflow=signal))
        return run is not None

    # Commands of workflows.

    def _carry_out(self, run: _SimulatedRun, command: WorkflowCommand) -> None:
        kind = command.WhichOneof("variant") or ""
        carry_out = self._commands.get(kind)
        if carry_out is None:
            raise WorkflowFailedError(f"{run.id}: the command {kind} is not simulated")
        carry_out(run, getattr(command, kind))

    def _continue_as_new(self, run: _SimulatedRun, new: Any) -> None:
        run.closed = True
        self._start(new.workflow_type or run.definition.name, run.id, new.arguments, run.parent)

    def _fail(self, run: _SimulatedRun, failed: Any) -> None:
        raise WorkflowFailedError(f"{run.id}: {_text(failed.failure)}")

    def _cancel_activity(self, run: _SimulatedRun, cancelled: Any) -> None:
        if call := run.calls.get(cancelled.seq):
            call.cancel()

    def _cancel_timer(self, run: _SimulatedRun, cancelled: Any) -> None:
        run.timers.discard(cancelled.seq)

    def _show(self, run: _SimulatedRun, shown: Any) -> None:
        """Do nothing: search attributes and the page are only for people."""

    def _start_timer(self, run: _SimulatedRun, timer: Any) -> None:
        number = timer.seq
        run.timers.add(number)

        def fire() -> None:
            if number in run.timers:
                run.timers.remove(number)
                run.jobs.append(WorkflowActivationJob(fire_timer=FireTimer(seq=number)))

        self.at(timer.start_to_fire_timeout.ToTimedelta().total_seconds(), fire)

    def _schedule(self, run: _SimulatedRun, scheduled: Any) -> None:
        kind = self._activities[scheduled.activity_type]
        [request] = DATA_CONVERTER.payload_converter.from_payloads(scheduled.arguments, [kind])
        number = scheduled.seq

        def resolve(resolution: ActivityResolution) -> None:
            run.calls.pop(number, None)
            run.jobs.append(WorkflowActivationJob(resolve_activity=ResolveActivity(seq=number, result=resolution)))

        call = run.calls[number] = ActivityCall(request, run.id, self.now_ns, resolve)
        if scheduled.HasField("schedule_to_close_timeout"):
            self.at(scheduled.schedule_to_close_timeout.ToTimedelta().total_seconds(), call.time_out)
        self._perform(call)

    def _start_child(self, run: _SimulatedRun, child: Any) -> None:
        self._start(child.workflow_type, child.workflow_id, child.input, (run.id, child.seq))
        succeeded = ResolveChildWorkflowExecutionStartSuccess(run_id=self._runs[child.workflow_id].run_id)
        started = ResolveChildWorkflowExecutionStart(seq=child.seq, succeeded=succeeded)
        run.jobs.append(WorkflowActivationJob(resolve_child_workflow_execution_start=started))

    def _signal_external(self, run: _SimulatedRun, sent: Any) -> None:
        target = sent.child_workflow_id or sent.workflow_execution.workflow_id
        answer = ResolveSignalExternalWorkflow(seq=sent.seq)
        if not self._signal(target, sent.signal_name, sent.args):
            answer.failure.message = f"there is no workflow {target}"
        run.jobs.append(WorkflowActivationJob(resolve_signal_external_workflow=answer))

    def _respond(self, run: _SimulatedRun, response: Any) -> None:
        done = run.updates.get(response.protocol_instance_id)
        if done is None or response.HasField("accepted"):
            return
        del run.updates[response.protocol_instance_id]
        done(response.completed if response.HasField("completed") else UpdateRefusedError(_text(response.rejected)))

    def _close(self, run: _SimulatedRun, completed: Any) -> None:
        run.closed, run.result = True, completed.result
        if run.parent is None:
            return
        parent, number = run.parent
        if (waiting := self._open(parent)) is not None:
            result = ChildWorkflowResult(completed=ChildSucceeded(result=completed.result))
            ended = ResolveChildWorkflowExecution(seq=number, result=result)
            waiting.jobs.append(WorkflowActivationJob(resolve_child_workflow_execution=ended))


def _encoded(values: Sequence[Any]) -> list[Payload]:
    return DATA_CONVERTER.payload_converter.to_payloads(values)


def _timestamp(time_ns: int) -> Timestamp:
    return Timestamp(seconds=time_ns // S, nanos=time_ns % S)


def _text(failure: Failure) -> str:
    text = f"{failure.message}\n{failure.stack_trace}".strip()
    return f"{text}\ncaused by {_text(failure.cause)}" if failure.HasField("cause") else text
