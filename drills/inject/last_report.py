"""A worker dies as an activity's result reaches Temporal: it is durable, and no worker gets the next workflow task.

A worker takes that task within milliseconds, so that no kill from within comes in time. Here a separate process does
both: it kills the worker, which waits at the end of the activity, and then sends the result in its place, as a message
that was under way when its sender died. Temporal cannot see a difference.

Run as ``python -m drills.inject.last_report`` by that worker, with a ``LastReport`` as JSON on standard input.
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
"""Time after the worker's death until Temporal drops its polls, and time after the report until its events
are durable, seconds; a new worker needs longer to start."""
ALIVE_S = 0.1
"""Time between two heartbeats of the activity meanwhile, seconds."""


class LastReport(BaseModel):
    """The work that a worker leaves to another process for after its death."""

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
    """Plan of the fault."""
    fault: dict[str, Any]


async def die(client: Client, plan: Path, fault: dict[str, Any], result: Any) -> None:
    """Have this worker killed and the calling activity's ``result`` reported; returns only if that failed."""
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
        activity.heartbeat()  # its work is over, and Temporal must not retry it elsewhere
        await asyncio.wait([sending], timeout=ALIVE_S)


async def send(report: LastReport) -> None:
    """Kill the worker, which is this process's parent, report the result, and record the newest event at that time.

    Raises:
        RPCError: Temporal did not accept the result; the worker is dead and no mark is written.
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
