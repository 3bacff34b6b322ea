"""Activities of jobs and incidents that ask the pool of machines: a workflow cannot send an update to another one.

An update may be sent twice: the pool knows a lease by its run and a replacement by its id, and answers the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import BaseModel
from temporalio import activity
from temporalio.client import Client, WithStartWorkflowOperation, WorkflowUpdateFailedError
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from activities import messages
from activities.heartbeat import heartbeating
from activities.messages import AwaitStandbysInput
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

ASK_AGAIN_S = 1.0
"""Between two questions whether something has become free, seconds."""
ANSWER_LIMIT = timedelta(seconds=10)
"""A pool that does not answer within this time is asked anew."""
REFUSED_S = 10.0
"""Machines that another job has are asked for again so long: it may just have ended."""
POOL_TASK_TIMEOUT = timedelta(seconds=3)
"""A worker that dies within a task of the pool delays it so long."""

KEEP_S = 30.0
"""Between two looks whether the pool runs, seconds."""

T = TypeVar("T", bound=BaseModel | int)


async def update_pool(client: Client, task_queue: str, name: str, request: BaseModel, result: type[T]) -> T:
    """Ask the pool of a cluster for something.

    Raises:
        ApplicationError: it cannot answer now; it may be asked again.
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


class PoolActivities:
    """What jobs and incidents ask of the pool."""

    @activity.defn(name=messages.POOL_LEASE)
    async def lease(self, request: LeaseRequest) -> Leased:
        """Ask for the machines of a job that starts; those that another one has are asked for again for a while."""
        clock = asyncio.get_running_loop()
        until_s = clock.time() + REFUSED_S
        async with heartbeating() as say:
            while True:
                leased = await update_pool(activity.client(), _queue(), "lease", request, Leased)
                if not leased.may_change or clock.time() >= until_s:
                    return leased
                say("; ".join(f"{name}: {why}" for name, why in leased.refused.items())[:300])
                await asyncio.sleep(ASK_AGAIN_S)

    @activity.defn(name=messages.POOL_REPLACE)
    async def replace(self, request: ReplaceRequest) -> Replaced:
        """Ask for machines in the places of those that are to leave a job."""
        async with heartbeating():
            return await update_pool(activity.client(), _queue(), "replace", request, Replaced)

    @activity.defn(name=messages.POOL_GIVE_BACK)
    async def give_back(self, request: GiveBack) -> int:
        """Say that a job has left machines; returns how many it had."""
        async with heartbeating():
            return await update_pool(activity.client(), _queue(), "give_back", request, int)

    @activity.defn(name=messages.POOL_AWAIT)
    async def await_standbys(self, wait: AwaitStandbysInput) -> int:
        """Wait until there are so many machines to spare; returns how many there are."""
        clock = asyncio.get_running_loop()
        until_s = clock.time() + wait.patience_s
        handle = activity.client().get_workflow_handle(pool_workflow_id(_queue()))
        async with heartbeating() as say:
            while True:
                state: PoolState = await handle.query("state", result_type=PoolState, rpc_timeout=ANSWER_LIMIT)
                if state.spare >= wait.count or clock.time() >= until_s:
                    return state.spare
                say(f"{state.spare} of {wait.count} machines are to spare")
                await asyncio.sleep(ASK_AGAIN_S)


async def keep_pool(client: Client, task_queue: str) -> None:
    """Have the pool of a cluster run, until cancelled: it is started anew where somebody ended it."""
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
        "static_summary": "The machines of the cluster, and whose they are",
    }


def _queue() -> str:
    return activity.info().task_queue
