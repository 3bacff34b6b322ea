"""The pool of a cluster's machines as commands use it."""

from __future__ import annotations

import getpass
from datetime import timedelta
from typing import Literal

from temporalio.client import (
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError, RPCStatusCode

from controlplane.client import Control
from everstep.errors import ClusterError, ConfigError
from everstep.model.pool import OperatorMove, PoolState, pool_workflow_id

ANSWER_LIMIT = timedelta(seconds=5)
"""A pool that does not answer within this time is not known (ours)."""
MOVE_LIMIT = timedelta(seconds=15)
"""One that is to do something has more (ours): it may have to look at its machines first."""


async def pool_state(control: Control) -> PoolState | None:
    """All machines and whose they are; None: there is no pool, or it does not answer."""
    handle = control.client.get_workflow_handle(pool_workflow_id(control.task_queue))
    try:
        state: PoolState = await handle.query("state", result_type=PoolState, rpc_timeout=ANSWER_LIMIT)
    except (RPCError, WorkflowQueryFailedError, ValueError):  # pydantic's errors are ValueErrors: of another release
        return None
    return state if state.known else None


async def move_machine(control: Control, what: Literal["evict", "release"], machine: str, reason: str) -> str:
    """Take a machine away from jobs, or let it come back; returns what becomes of it, for people.

    Raises:
        ConfigError: there is no such machine.
        ClusterError: there is no pool, or it does not answer.
    """
    move = OperatorMove(machine=machine, operator=getpass.getuser(), reason=reason)
    handle = control.client.get_workflow_handle(pool_workflow_id(control.task_queue))
    try:
        said: str = await handle.execute_update(what, move, result_type=str, rpc_timeout=MOVE_LIMIT)
    except WorkflowUpdateFailedError as error:
        refusal = f"{machine}: {error.cause}"
        raise ConfigError(refusal) from error
    except WorkflowUpdateRPCTimeoutOrCancelledError as error:
        raise ClusterError(
            f"the pool of machines did not answer: see that workers run, with task queue {control.task_queue}"
        ) from error
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise ClusterError("there is no pool of machines yet: a worker of this release starts it") from error
        raise ClusterError(f"Temporal does not answer ({error})") from error
    return said
