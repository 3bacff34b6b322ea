"""Updates of the machine pool, sent by activities, because a workflow cannot send an update to another workflow.

An update may be sent twice: the pool knows a lease by its run and a replacement by its id, and gives the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import BaseModel
from temporalio.client import Client, WithStartWorkflowOperation, WorkflowUpdateFailedError
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from everstep.model.pool import (
    POOL_WORKFLOW,
    PoolState,
    pool_workflow_id,
)

ASK_AGAIN_S = 1.0
"""The time between two questions whether a machine is free, seconds."""
POOL_LIMIT = timedelta(seconds=15)
"""A pool that does not answer within this time is not awaited: it delays no incident, and no end of a job."""
ANSWER_LIMIT = timedelta(seconds=10)
"""The request is repeated after this time without an answer."""
POOL_TASK_TIMEOUT = timedelta(seconds=3)
"""A worker that dies during a workflow task of the pool delays the pool by this long."""

KEEP_S = 30.0
"""The time between two checks that the pool runs, seconds."""

T = TypeVar("T", bound=BaseModel | int)


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
        "static_summary": "The machines of the cluster, and whose they are",
    }
