"""An update of the job's code, asked for by a signal, three times the same, at the moment that the drill is about."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from temporalio.service import RPCError, RPCStatusCode

from drills.inject import new_code
from drills.inject.away import down
from drills.inject.context import LOOK_S, DrillContext
from drills.observe.observed import Absorbed
from drills.spec.request import DrillRequest
from drills.spec.updates import AGAIN, LR_FROM, OTHER_RATE, PARKED, RATE
from everstep.decisions.act.versions.book import WAITS
from everstep.errors import ClusterError, EverstepError
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, incident_workflow_id, job_workflow_id
from everstep.model.version import JobVersion, VersionStatus
from everstep.rank import drill_faults as faults

SIGNALS = 3
"""The same signal comes so often: it is applied once."""
TRIED_LIMIT_S = 120.0
"""A version was tried within this long, also where a part is away meanwhile."""
ASK_AGAIN_S = 0.2


async def ask_for_update(context: DrillContext) -> None:
    """Ask for it, and wait until the job may go on: it must not end before it was updated.

    Raises:
        ClusterError: the job or the cluster is not as it would have to be.
    """
    request = context.request
    if request.asked_during == PARKED:
        await _until(context, lambda state: state.status == "parked", "the job was not parked")
    else:
        await context.reach(request.at_step)
    match request.asked_during:
        case "kill-rank":
            await context.second_fault(exact=False)
            await _stopping(context)
            await _ask_and_try(context, 0)
            await _let_stop(context)
        case "kill-workers":
            async with down(context, [name for name in context.cluster.processes() if name.startswith("worker-")]):
                await _ask(context, 0)
                await asyncio.sleep(request.seconds)
        case "kill-temporal":
            async with down(context, ["temporal"]):
                asking = asyncio.create_task(_ask(context, 0))
                await asyncio.sleep(request.seconds)
            await asking
        case "kill-agent":
            async with down(context, [f"agent-{context.target.name}"]):
                await _ask(context, 0)
                await asyncio.sleep(request.seconds)
        case other:
            await _ask_and_try(context, 0)
            if other == AGAIN:
                context.planned.let_go()
                await _stopping(context)
                await _ask_and_try(context, 1)
                await _let_stop(context)
    await _carry_on(context)


async def _carry_on(context: DrillContext) -> None:
    """Strike what the update rides on, or wait until it needs the job to go on."""
    request = context.request
    await _tried(context)
    if request.at_start:
        mark = context.fired(request.base)
        assert mark is not None
        context.seen.absorbed = Absorbed(int(str(mark["time_ns"])), time.time_ns())
    elif request.then:
        if request.then == "kill-forkserver" and (server := await context.fork_server(context.target)):
            os.kill(server, signal.SIGKILL)
        await context.second_fault(exact=False)
    elif request.window:
        await _until(context, lambda state: state.status != "running" or _waits(context, state) is False, "not forced")
    context.planned.let_go()
    await _settled(context)


# Asking.


def update_of(request: DrillRequest, spec: JobSpec, folder: Path, number: int) -> dict[str, Any]:
    """What the signal says: the folder, and where the script is the example other learning rates from now on.

    Args:
        request: The drill.
        spec: The job as it was started.
        folder: With the code.
        number: Of the drill's updates, from 0 on.
    """
    asked: dict[str, Any] = {
        "code": str(folder),
        "urgency": "lazy" if request.lazy else "urgent",
        "operator": "drill",
        "reason": f"update {number + 1} of a drill",
    }
    if request.window:
        asked["window_h"] = request.window / 3600
    if changes_losses(request):
        asked["args"] = [*spec.args, LR_FROM, "0", str((RATE, OTHER_RATE)[number])]
    return asked


def changes_losses(request: DrillRequest) -> bool:
    """Whether the losses are others from the update on."""
    return request.base == "update" and not request.neutral and not request.script and request.config is None


def switched(request: DrillRequest, spec: JobSpec, versions: Sequence[JobVersion]) -> JobSpec:
    """The job that changes by itself, at the steps at which it was updated, what its updates changed."""
    if not changes_losses(request):
        return spec
    came = sorted(one.ranges[-1] + (one.number,) for one in versions if one.number > 1 and one.ranges)
    changes = [word for _, begin, _, number in came for word in (LR_FROM, str(begin), _rate(versions, number))]
    return spec.model_copy(update={"args": [*spec.args, *changes]})


def _rate(versions: Sequence[JobVersion], number: int) -> str:
    """The learning rate that a version brought."""
    asked = next(one for one in versions if one.number == number).request.args
    assert asked
    return asked[-1]


async def _ask_and_try(context: DrillContext, number: int) -> None:
    await _ask(context, number)
    await _tried(context)


async def _ask(context: DrillContext, number: int) -> None:
    """Write the code, and signal until Temporal has it, as often as the drill wants."""
    spec, request = context.spec, context.request
    folder = context.planned.plan.with_name(f"{context.planned.plan.name}.code-{number}")
    note = f"update {number + 1} of {context.planned.plan}"
    await asyncio.to_thread(new_code.write, spec, folder, new_code.lines_of(request), note)
    asked = update_of(request, spec, folder, number)
    handle = context.cluster.control.client.get_workflow_handle(job_workflow_id(spec.name))
    context.mark(request.base)
    context.seen.asked.append(str(folder))
    for _ in range(SIGNALS):
        while True:
            try:
                await handle.signal("update", asked)
                break
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    raise ClusterError(f"{spec.name} is over: nobody takes the update") from error
                await asyncio.sleep(ASK_AGAIN_S)


# Waiting.


async def _tried(context: DrillContext) -> None:
    """Until nothing is made or tried any more."""

    def tried(state: JobState) -> bool:
        asked = _asked(context, state)
        return asked is not None and asked.status is not VersionStatus.CHECKING

    await _until(context, tried, "the update was not tried")


async def _settled(context: DrillContext) -> None:
    """Until the job runs and nothing waits any more, or is over."""

    def settled(state: JobState) -> bool:
        return bool(state.outcome) or (state.status == "running" and _waits(context, state) is False)

    await _until(context, settled, "the update was not applied")


def _asked(context: DrillContext, state: JobState) -> JobVersion | None:
    """The version that was asked for last; None: the job does not know it yet, or not any more."""
    folder = context.seen.asked[-1]
    return next((one for one in reversed(state.versions) if one.request.code == folder), None)


def _waits(context: DrillContext, state: JobState) -> bool | None:
    """Whether it was not applied yet; None: the job does not know it."""
    asked = _asked(context, state)
    return None if asked is None else asked.status in WAITS


async def _stopping(context: DrillContext) -> None:
    """Until the incident that is open waits in its stop for the drill."""
    hold = context.planned.workers[0]
    plan = context.planned.worker_plan
    await context.until(lambda: faults.fired(plan, hold) is not None, TRIED_LIMIT_S, "no incident came to its stop")


async def _let_stop(context: DrillContext) -> None:
    """Let the incident go on, once it has heard of the version from the job: so it takes it along."""
    deadline = time.monotonic() + TRIED_LIMIT_S
    while not await _has_heard(context):
        if time.monotonic() >= deadline:
            raise ClusterError(f"the incident heard of no version within {TRIED_LIMIT_S:.0f} s")
        await asyncio.sleep(ASK_AGAIN_S)
    await asyncio.to_thread(Path(context.planned.workers[0]["until"]).touch)


async def _has_heard(context: DrillContext) -> bool:
    client, folder = context.cluster.control.client, context.seen.asked[-1]
    with suppress(RPCError):
        async for event in client.get_workflow_handle(
            incident_workflow_id(context.spec.name, 1)
        ).fetch_history_events():
            said = event.workflow_execution_signaled_event_attributes
            if said.signal_name == "versions":
                [versions] = await client.data_converter.decode(said.input.payloads, [list[JobVersion]])
                if any(one.request.code == folder and one.status is VersionStatus.PENDING for one in versions):
                    return True
    return False


async def _until(context: DrillContext, holds: Callable[[JobState], bool], what: str) -> None:
    deadline = time.monotonic() + TRIED_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(EverstepError):
            state = await context.cluster.control.state(context.spec.name)
            if holds(state):
                return
            if state.outcome:
                raise ClusterError(f"{what}: the job is over, {state.outcome}")
        await asyncio.sleep(LOOK_S)
    raise ClusterError(f"{what} within {TRIED_LIMIT_S:.0f} s")
