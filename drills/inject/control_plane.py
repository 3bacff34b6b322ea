"""Faults of the control plane inside a worker: a process dies in a stage of an incident, or at an event of its history.

A worker loads this only if ``EVERSTEP_FAULTS`` is in its own environment. It reads the plan
(``everstep/rank/drill_faults.py``) again each time, so that one cluster can serve many drills. A plan has entries of
three kinds:

``{"id", "fault": "kill-worker" | "drain-worker" | "kill-temporal", "job", "in_stage", "moment", "version", "pid",
"signal"}``
    A signal, SIGKILL by default, to this worker, or to the process ``pid``, in the activity of a stage of an incident,
    or of a stage in which the job prepares an update before it opens an incident. It is sent when the activity
    ``begin``s, in the activity's ``middle`` (the work is under way) or at its ``end`` (the work is done, but the result
    is not reported yet). A ``version`` selects the launch of that version of the code. The stage ``report`` is before
    the incident: the worker has seen a fault and reports it to the job.

``{"id", "fault": "hold", "job", "in_stage", "moment", "until"}``
    No fault: the activity waits until the file ``until`` exists, so that another fault can strike in that stage.

``{"id", "fault": "kill-worker", "job", "at_event": n, "workflow_id"}``
    SIGKILL of this worker as soon as it can know that event n of the workflow's history is durable. The workflow is by
    default the job's first incident. Five checks compare n with the newest durable event, and the first one that finds
    ``n <= newest`` kills:

    1. in a workflow task, after the workflow's code ran and before its commands are sent: it catches
       WorkflowTaskStarted;
    2. at the begin of an activity, before it has any effect: it catches the commands of the last workflow task, which
       become durable together;
    3. at the end of an activity, after its effects and before its result is reported: it catches ActivityTaskStarted,
       which the server writes together with the result;
    4. when the result is reported: it catches ActivityTaskCompleted, and the WorkflowTaskScheduled after it
       (``drills/inject/last_report.py``);
    5. from outside, by polls of the history (``drills/inject/history_watch.py``): it catches all other events, such as
       WorkflowExecutionStarted.

    Activities that run at the same time then report their results one after the other, each when no workflow task is
    under way. Otherwise one workflow task could process several results, and some events would never be the newest. The
    mark of the fault names the check, and the newest durable event.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from temporalio import activity, client
from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.plugin import SimplePlugin
from temporalio.service import RPCError
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    WorkflowInstance,
    WorkflowInstanceDetails,
    WorkflowRunner,
)

from activities.agents.launch_ranks import LaunchRanks
from drills.inject import last_report
from drills.spec.stages import BEFORE_AN_UPDATE, REPORT, STAGES
from everstep.model.job_state import incident_workflow_id, job_workflow_id
from everstep.rank import drill_faults as faults
from everstep.rank import environment

Fault = dict[str, Any]

MIDDLE_S = 0.02
"""An activity is in its middle after this time, seconds; a shorter activity is in its middle at the end of its work."""
POLL_S = 0.004
"""Time between two queries whether a workflow task is under way, seconds."""
REST_S = 1.0
"""Longest wait of a result for the previous result and for the current workflow task, seconds."""
RECOVERS = ("Incident", "Replay")
"""Types of the workflows in whose activities and workflow tasks faults strike."""


def plugins() -> list[DrillPlugin]:
    """Return the plugins of a worker in a drill's cluster; empty in any other cluster."""
    return [DrillPlugin()] if os.environ.get(environment.FAULTS) else []


class DrillPlugin(SimplePlugin):
    """Adds the checks to a worker's activities, workflow tasks and reports."""

    def __init__(self) -> None:
        interceptors: list[Interceptor | client.Interceptor] = [_Activities(self), _Reports()]
        super().__init__("everstep.drill", workflow_runner=_wrap, interceptors=interceptors)
        self.client: client.Client | None = None
        self._reported: dict[str, int] = {}
        """Id of a workflow with a fault at an event → its newest event before the last result was reported."""

    def configure_worker(self, config: Any) -> Any:
        """Keep the worker's client, which reads histories."""
        self.client = config["client"]
        return super().configure_worker(config)

    async def durable(self, workflow_id: str) -> int:
        """Return the number of a workflow's newest durable event; 0: there is none."""
        described = await self._describe(workflow_id)
        return described.history_length if described else 0

    async def turn(self, workflow_id: str) -> None:
        """Wait until the previous result is durable and no workflow task is under way, but at most ``REST_S``."""
        deadline = time.monotonic() + REST_S
        while time.monotonic() < deadline:
            described = await self._describe(workflow_id)
            if described is None:
                return
            busy = described.raw_description.HasField("pending_workflow_task")
            if not busy and described.history_length > self._reported.get(workflow_id, 0):
                self._reported[workflow_id] = described.history_length
                return
            await asyncio.sleep(POLL_S)

    async def _describe(self, workflow_id: str) -> client.WorkflowExecutionDescription | None:
        assert self.client is not None
        try:
            return await self.client.get_workflow_handle(workflow_id).describe()
        except RPCError:
            return None


class _Activities(Interceptor):
    def __init__(self, drill: DrillPlugin) -> None:
        self._drill = drill

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Activity(next, self._drill)


class _Activity(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, drill: DrillPlugin) -> None:
        super().__init__(next)
        self._drill = drill

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        info = activity.info()
        if info.workflow_type not in RECOVERS and info.activity_type not in BEFORE_AN_UPDATE.values():
            return await self.next.execute_activity(input)
        result = await _at_each_moment(self.next.execute_activity(input), partial(self._meet, input))
        await self._report(result)
        return result

    async def _report(self, result: Any) -> None:
        """Have the worker killed when its result is reported, if that report causes the event."""
        info = activity.info()
        assert info.workflow_id is not None
        for plan, fault in _pending("at_event"):
            if info.workflow_id == _swept(fault) and not info.is_local:
                newest = await self._drill.durable(info.workflow_id)
                # The report causes ActivityTaskStarted, ActivityTaskCompleted and WorkflowTaskScheduled.
                if newest + 1 < fault["at_event"] <= newest + 3:
                    assert self._drill.client is not None
                    await last_report.die(self._drill.client, plan, fault, result)

    async def _meet(self, input: ExecuteActivityInput, moment: str) -> None:
        info = activity.info()
        assert info.workflow_id is not None
        place = f"{moment} of {info.activity_type}"
        for plan, fault in _pending("in_stage"):
            job = fault["job"]
            prefixes = (f"incident/{job}/", f"replay/{job}/")
            of_job = info.workflow_id == job_workflow_id(job) or info.workflow_id.startswith(prefixes)
            in_stage = info.activity_type == STAGES.get(fault["in_stage"]) and moment == fault.get("moment", "middle")
            if of_job and in_stage and ("version" not in fault or _launches(input, fault["version"])):
                await _strike(plan, fault, place)
        if moment == "middle":
            return
        for plan, fault in _pending("at_event"):
            if info.workflow_id == _swept(fault):
                if moment == "end":
                    await self._drill.turn(info.workflow_id)
                newest = await self._drill.durable(info.workflow_id)
                # At its end, ActivityTaskStarted has happened too: the server writes it together with the result.
                if newest + (moment == "end") >= fault["at_event"]:
                    die(plan, fault, place=place, newest=newest)


class _Reports(client.Interceptor):
    def intercept_client(self, next: client.OutboundInterceptor) -> client.OutboundInterceptor:
        return _Report(next)


class _Report(client.OutboundInterceptor):
    """Strikes when a watcher reports a fault to a job."""

    async def start_workflow_update(self, input: client.StartWorkflowUpdateInput) -> client.WorkflowUpdateHandle[Any]:
        if input.update != REPORT:
            return await super().start_workflow_update(input)

        async def meet(moment: str) -> None:
            for plan, fault in _pending("in_stage"):
                of_job = fault["in_stage"] == REPORT and input.id == job_workflow_id(fault["job"])
                if of_job and moment == fault.get("moment", "middle"):
                    await _strike(plan, fault, f"{moment} of a report")

        handle: client.WorkflowUpdateHandle[Any] = await _at_each_moment(super().start_workflow_update(input), meet)
        return handle


async def _at_each_moment(work: Coroutine[Any, Any, Any], meet: Callable[[str], Awaitable[None]]) -> Any:
    """Run some work, and call ``meet`` at its begin, in its middle and at its end."""
    running: asyncio.Future[Any] | None = None
    try:
        await meet("begin")
        running = asyncio.ensure_future(work)
        done, _ = await asyncio.wait([running], timeout=MIDDLE_S)
        await meet("middle")
        if not done:
            await asyncio.wait([running])
    finally:
        if running is None:
            work.close()
        elif not running.done():
            running.cancel()
    await meet("end")
    return await running


class _FaultRunner(WorkflowRunner):
    """A runner of workflows with a check after each workflow task of an incident or a replay."""

    def __init__(self, inner: WorkflowRunner) -> None:
        self._inner = inner

    def prepare_workflow(self, defn: Any) -> None:
        self._inner.prepare_workflow(defn)

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        instance = self._inner.create_instance(det)
        if det.info.workflow_type not in RECOVERS:
            return instance
        inner_activate = instance.activate
        workflow_id = det.info.workflow_id

        def activate(act: WorkflowActivation) -> WorkflowActivationCompletion:
            completion = inner_activate(act)
            if not act.is_replaying and any(_advances(job) for job in act.jobs):
                for plan, fault in _pending("at_event"):
                    if workflow_id == _swept(fault) and act.history_length >= fault["at_event"]:
                        die(plan, fault, place="workflow task", newest=act.history_length)
            return completion

        instance.activate = activate  # type: ignore[method-assign]
        return instance

    def set_worker_level_failure_exception_types(self, types: Any) -> None:
        self._inner.set_worker_level_failure_exception_types(types)


def _wrap(inner: WorkflowRunner | None) -> WorkflowRunner:
    assert inner is not None
    return _FaultRunner(inner)


def _launches(input: ExecuteActivityInput, version: int) -> bool:
    """Return whether an activity launches this version of the code."""
    launch = input.args[0]
    return isinstance(launch, LaunchRanks) and launch.job.spec.version == version


def _swept(fault: Fault) -> str:
    """Return the id of the workflow whose history has the event."""
    return str(fault.get("workflow_id") or incident_workflow_id(fault["job"], 1))


def _advances(job: Any) -> bool:
    """Return whether a job of an activation advances the workflow. Queries and removals from the cache do not advance
    it."""
    return job.WhichOneof("variant") not in ("query_workflow", "remove_from_cache")


def _pending(key: str) -> Iterator[tuple[Path, Fault]]:
    """The entries of the worker's plan that have this key and have not fired."""
    try:
        loaded = faults.load_plan()
    except ValueError:  # another process is writing the plan
        return
    if loaded is None:
        return
    plan, entries = loaded
    for fault in entries:
        if key in fault and faults.fired(plan, fault) is None:
            yield plan, fault


async def _strike(plan: Path, fault: Fault, place: str) -> None:
    if fault["fault"] == "hold":
        await _hold(plan, fault, place)
    else:
        die(plan, fault, place=place)


async def _hold(plan: Path, fault: Fault, place: str) -> None:
    """Wait until the entry's file exists; only the first worker that meets the entry waits."""
    until, deadline = Path(fault["until"]), time.monotonic() + faults.HOLD_S
    if faults.claim(plan, fault, place=place):
        while not await asyncio.to_thread(until.exists) and time.monotonic() < deadline:
            if activity.in_activity():
                activity.heartbeat()  # without heartbeats Temporal would retry the activity elsewhere
            await asyncio.sleep(0.01)


def die(plan: Path, fault: Fault, **details: Any) -> None:
    """Send the signal to this worker, or to the process in the entry; only the first worker that meets the entry does
    this."""
    if faults.claim(plan, fault, **details):
        os.kill(fault.get("pid") or os.getpid(), fault.get("signal", signal.SIGKILL))
