"""The requests of jobs and incidents to the machine pool: lease, replace and give back machines, and await standbys.

A workflow cannot send an update to another workflow, so activities send the updates. An update may be sent twice: the
pool recognizes a lease by its run and a replacement by its id, and gives the same answer again.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from temporalio import activity
from temporalio.client import Client, WithStartWorkflowOperation, WorkflowUpdateFailedError
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from activities.activity import Activity, Bounds, awaiting, not_yet, within
from activities.heartbeat import Say
from everstep.base.text import listed
from everstep.model.pool import (
    POOL_WORKFLOW,
    GiveBack,
    Leased,
    LeaseRequest,
    PoolState,
    Replaced,
    ReplaceRequest,
    pool_workflow_id,
)

if TYPE_CHECKING:
    from activities.tools import Tools

ASK_AGAIN_S = 1.0
"""The time between two checks of whether a machine is free, seconds."""
POOL_LIMIT = timedelta(seconds=15)
"""An incident, or the end of a job, does not wait longer than this for the pool."""
ANSWER_LIMIT = timedelta(seconds=10)
"""A request to the pool that gets no answer within this time is repeated."""
POOL_TASK_TIMEOUT = timedelta(seconds=3)
"""A worker that dies during a workflow task of the pool delays the pool by this long."""
REFUSED_S = 10.0
"""A machine that belongs to another job is requested again for this long, seconds: that job may just have ended."""
KEEP_S = 30.0
"""The time between two checks that the pool runs, seconds."""

T = TypeVar("T", bound=BaseModel | int)


class LeaseMachines(Activity[Leased]):
    """Lease the machines of a job that starts; machines of other jobs are requested again for a while.

    If the pool does not answer, the activity waits for it, because two jobs may not share a machine.
    """

    name = "Lease machines"

    request: LeaseRequest

    def line(self) -> str:
        return listed([machine.name for machine in self.request.machines])

    def bounds(self) -> Bounds:
        return Bounds(timedelta(minutes=1), None)

    async def perform(self, tools: Tools, say: Say) -> Leased:
        clock = asyncio.get_running_loop()
        until_s = clock.time() + REFUSED_S
        while True:
            leased = await update_pool(activity.client(), activity.info().task_queue, "lease", self.request, Leased)
            if not leased.may_change or clock.time() >= until_s:
                return leased
            say("; ".join(f"{name}: {why}" for name, why in leased.refused.items())[:300])
            await asyncio.sleep(ASK_AGAIN_S)


class ReplaceMachines(Activity[Replaced]):
    """Lease the machines that replace evicted ones: all that are needed, or none."""

    name = "Replace machines"

    request: ReplaceRequest

    def line(self) -> str:
        return listed([f"{eviction.machine} ({eviction.reason})" for eviction in self.request.evict], 4)

    def bounds(self) -> Bounds:
        return within(POOL_LIMIT)

    async def perform(self, tools: Tools, say: Say) -> Replaced:
        return await update_pool(activity.client(), activity.info().task_queue, "replace", self.request, Replaced)


class GiveMachinesBack(Activity[int]):
    """Report to the pool that a job has left its machines; the result is the number of machines that the job had."""

    name = "Give machines back"

    request: GiveBack

    def line(self) -> str:
        return self.request.job

    def bounds(self) -> Bounds:
        return within(POOL_LIMIT)

    async def perform(self, tools: Tools, say: Say) -> int:
        return await update_pool(activity.client(), activity.info().task_queue, "give_back", self.request, int)


class AwaitStandbys(Activity[None]):
    """Wait until the pool has enough free machines; it fails if it does not have them in time."""

    name = "Await standbys"

    count: int
    patience_s: float
    """The longest wait, seconds."""

    def line(self) -> str:
        return f"{self.count} free machines"

    def bounds(self) -> Bounds:
        return awaiting(2 * ANSWER_LIMIT, timedelta(seconds=self.patience_s))

    async def perform(self, tools: Tools, say: Say) -> None:
        handle = activity.client().get_workflow_handle(pool_workflow_id(activity.info().task_queue))
        state: PoolState = await handle.query("state", result_type=PoolState, rpc_timeout=ANSWER_LIMIT)
        if state.spare < self.count:
            raise not_yet(f"{state.spare} of {self.count} machines are free", activity.info().attempt)


async def update_pool(client: Client, task_queue: str, name: str, request: BaseModel, result: type[T]) -> T:
    """Send an update to the pool of a cluster.

    Raises:
        ApplicationError: the pool cannot answer now; the request may be repeated.
        temporalio.service.RPCError: Temporal does not answer.
    """
    try:
        answer: T = await client.execute_update_with_start_workflow(
            name,
            request,
            start_workflow_operation=WithStartWorkflowOperation(POOL_WORKFLOW, PoolState(), **_start(task_queue)),
            result_type=result,
            rpc_timeout=ANSWER_LIMIT,
        )
    except WorkflowUpdateFailedError as error:
        raise ApplicationError(str(error.cause), type="PoolUnknown") from error
    return answer


async def keep_pool(client: Client, task_queue: str) -> None:
    """Keep the pool of a cluster running, until cancelled: it is started again if it was ended."""
    while True:
        with contextlib.suppress(RPCError):
            await client.start_workflow(POOL_WORKFLOW, PoolState(), **_start(task_queue))
        await asyncio.sleep(KEEP_S)


def _start(task_queue: str) -> dict[str, Any]:
    return {
        "id": pool_workflow_id(task_queue),
        "id_conflict_policy": WorkflowIDConflictPolicy.USE_EXISTING,
        "task_queue": task_queue,
        "task_timeout": POOL_TASK_TIMEOUT,
        "static_summary": "All machines of the cluster and the jobs that have them",
    }
