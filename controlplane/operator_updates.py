"""Requests of an operator to a workflow, sent as updates of Temporal, with errors that explain a missing answer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import FailureError
from temporalio.service import RPCError, RPCStatusCode

from controlplane.client import Control
from everstep.errors import ClusterError, ConfigError

LIMIT = timedelta(seconds=15)
"""Time limit for an answer; the workflow may inspect machines before it answers."""


async def ask(control: Control, workflow_id: str, update: str, request: Any, *, name: str, missing: str) -> str:
    """Send an update to a workflow; returns its answer as text.

    Args:
        control: Connection to the cluster.
        workflow_id: Id of the workflow.
        update: Name of the update.
        request: Argument of the update.
        name: Name of the workflow in messages.
        missing: Message for a workflow that does not exist.

    Raises:
        ConfigError: the workflow refused; the message is from the workflow.
        ClusterError: there is no such workflow, or it does not answer.
    """
    handle = control.client.get_workflow_handle(workflow_id)
    try:
        answer: str = await handle.execute_update(update, request, result_type=str, rpc_timeout=LIMIT)
    except WorkflowUpdateFailedError as error:
        refused = error.cause.message if isinstance(error.cause, FailureError) else str(error.cause)
        raise ConfigError(refused) from error
    except WorkflowUpdateRPCTimeoutOrCancelledError as error:
        raise ClusterError(
            f"{name} did not answer: check that workers run with task queue {control.task_queue}"
        ) from error
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise ClusterError(missing) from error
        raise ClusterError(f"Temporal does not answer ({error})") from error
    return answer


async def approve(control: Control, incident_id: str, operator: str, note: str = "") -> str:
    """Approve the evictions that wait for an operator; returns the answer of the incident as text.

    Raises:
        ConfigError: no eviction waits; the message names a remedy.
        ClusterError: Temporal does not answer, or no worker does.
    """
    request, missing = {"operator": operator, "note": note}, f"{incident_id} is closed: see 'everstep incidents'"
    return await ask(control, incident_id, "approve", request, name=incident_id, missing=missing)
