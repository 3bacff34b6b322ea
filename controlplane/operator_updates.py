"""What an operator asks of a workflow that answers at once: an update, and what is said where none comes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import FailureError
from temporalio.service import RPCError, RPCStatusCode

from controlplane.client import Control
from everstep.errors import ClusterError, ConfigError

LIMIT = timedelta(seconds=15)
"""A workflow that does not answer within this time is given up: it may have to look at machines first."""


async def ask(control: Control, workflow_id: str, update: str, request: Any, *, who: str, missing: str) -> str:
    """What a workflow answers to an update, for people.

    Args:
        control: Whose Temporal has it.
        workflow_id: Its id.
        update: Name of the update.
        request: Its argument.
        who: What the workflow is, for messages.
        missing: What is said where there is none.

    Raises:
        ConfigError: it refused; the message is its own.
        ClusterError: there is none, or it does not answer.
    """
    handle = control.client.get_workflow_handle(workflow_id)
    try:
        said: str = await handle.execute_update(update, request, result_type=str, rpc_timeout=LIMIT)
    except WorkflowUpdateFailedError as error:
        refused = error.cause.message if isinstance(error.cause, FailureError) else str(error.cause)
        raise ConfigError(refused) from error
    except WorkflowUpdateRPCTimeoutOrCancelledError as error:
        raise ClusterError(
            f"{who} did not answer: see that workers run, with task queue {control.task_queue}"
        ) from error
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise ClusterError(missing) from error
        raise ClusterError(f"Temporal does not answer ({error})") from error
    return said


async def approve(control: Control, incident_id: str, operator: str, note: str = "") -> str:
    """Let the machines leave a job that wait for an operator's approval; returns which, for people.

    Raises:
        ConfigError: none waits for it; the message says what to do.
        ClusterError: Temporal does not answer, or no worker does.
    """
    request, missing = {"operator": operator, "note": note}, f"{incident_id} is over: see 'everstep incidents'"
    return await ask(control, incident_id, "approve", request, who=incident_id, missing=missing)
