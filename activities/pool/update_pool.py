"""Updates of the pool of machines, sent by activities: a workflow cannot send an update to another one.

An update may be sent twice: the pool knows a lease by its run and a replacement by its id, and answers the same.
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
"""Between two questions whether a machine has become free, seconds."""
POOL_LIMIT = timedelta(seconds=15)
"""A pool that does not answer within this time delays no incident, and no end of a job."""
ANSWER_LIMIT = timedelta(seconds=10)
"""A pool that does not answer within this time is asked anew."""
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
