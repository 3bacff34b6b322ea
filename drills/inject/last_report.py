"""Kills a worker at the moment when an activity's result is durable in Temporal, and no later.

After a result the worker gets the next workflow task within milliseconds, so it cannot be killed in time from within.
Instead the worker waits at the end of the activity, and a separate process first kills the worker and then sends the
result in its place. To Temporal this looks like a message that was on its way when its sender died.

The worker runs ``python -m drills.inject.last_report`` with a ``LastReport`` as JSON on standard input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from temporalio import activity
from temporalio.api.common.v1 import Payloads
from temporalio.api.workflowservice.v1 import RespondActivityTaskCompletedRequest
from temporalio.client import Client

from everstep.rank import drill_faults as faults

SETTLE_S = 0.1
"""Temporal drops the polls of a dead worker within this time, and makes the events of a report durable within this
time, seconds. A new worker needs longer to start."""
ALIVE_S = 0.1
"""Time between two heartbeats of the waiting activity, seconds."""


class LastReport(BaseModel):
    """The report that another process has to send after the worker's death."""

    address: str
    """Address of Temporal's frontend."""
    namespace: str
    workflow_id: str
    token: str
    """The activity's task token, in hexadecimal digits."""
    result: str
    """The activity's result: a serialized ``Payloads`` message, in hexadecimal digits."""
    worker: int
    """Pid of the worker."""
    place: str
    plan: Path
    """The plan with the fault."""
    fault: dict[str, Any]


async def die(client: Client, plan: Path, fault: dict[str, Any], result: Any) -> None:
    """Let another process kill this worker and then report the activity's result; returns only if that failed."""
    info = activity.info()
    assert info.workflow_id is not None
    payloads = Payloads(payloads=await client.data_converter.encode([result]))
    report = LastReport(
        address=client.service_client.config.target_host,
        namespace=client.namespace,
        workflow_id=info.workflow_id,
        token=info.task_token.hex(),
        result=payloads.SerializeToString().hex(),
        worker=os.getpid(),
        place=f"result of {info.activity_type} reported",
        plan=plan,
        fault=fault,
    )
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "drills.inject.last_report"),
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    sending = asyncio.ensure_future(sender.communicate(report.model_dump_json().encode()))
    while not sending.done():
        activity.heartbeat()  # without heartbeats Temporal would retry the activity elsewhere
        await asyncio.wait([sending], timeout=ALIVE_S)


async def send(report: LastReport) -> None:
    """Kill the worker, which is this process's parent; then report the result, and mark which event was the newest.

    Raises:
        RPCError: Temporal did not accept the result; the worker is dead, and no mark is written.
    """
    client = await Client.connect(report.address, namespace=report.namespace)
    if os.getppid() != report.worker:
        return
    os.kill(report.worker, signal.SIGKILL)
    while os.getppid() == report.worker:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.001)
    await asyncio.sleep(SETTLE_S)
    done = RespondActivityTaskCompletedRequest(
        namespace=report.namespace,
        task_token=bytes.fromhex(report.token),
        result=Payloads.FromString(bytes.fromhex(report.result)),
        identity="last report",
    )
    await client.workflow_service.respond_activity_task_completed(done)
    await asyncio.sleep(SETTLE_S)
    described = await client.get_workflow_handle(report.workflow_id).describe()
    faults.claim(report.plan, report.fault, place=report.place, newest=described.history_length, pid=report.worker)


if __name__ == "__main__":
    asyncio.run(send(LastReport.model_validate_json(sys.stdin.read())))
