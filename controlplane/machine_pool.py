"""Queries and requests of commands to the machine pool of a cluster."""

from __future__ import annotations

import getpass
from datetime import timedelta
from typing import Literal

from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError

from controlplane.client import Control
from controlplane.operator_updates import ask
from everstep.errors import ConfigError
from everstep.model.pool import OperatorMove, PoolState, pool_workflow_id

ANSWER_LIMIT = timedelta(seconds=5)
"""A pool that does not answer within this time counts as unknown."""


async def pool_state(control: Control) -> PoolState | None:
    """The state of all machines; None: there is no machine pool, or it does not answer."""
    handle = control.client.get_workflow_handle(pool_workflow_id(control.task_queue))
    try:
        state: PoolState = await handle.query("state", result_type=PoolState, rpc_timeout=ANSWER_LIMIT)
    except (RPCError, WorkflowQueryFailedError, ValueError):  # pydantic raises ValueError if another release answers
        return None
    return state if state.known else None


async def move_machine(control: Control, update: Literal["evict", "release"], machine: str, reason: str) -> str:
    """Evict or release a machine; returns the answer of the machine pool as text.

    Raises:
        ConfigError: there is no such machine.
        ClusterError: there is no pool, or it does not answer.
    """
    move = OperatorMove(machine=machine, operator=getpass.getuser(), reason=reason)
    id, missing = pool_workflow_id(control.task_queue), "there is no machine pool yet: a worker starts it"
    try:
        return await ask(control, id, update, move, name="the machine pool", missing=missing)
    except ConfigError as error:
        raise ConfigError(f"{machine}: {error}") from error
