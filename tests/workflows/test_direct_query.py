"""A query that comes before the task of a worker that died: the job goes on as its history says, and replays."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Replayer, Worker

from activities.payloads import DATA_CONVERTER
from everstep.model.job_state import ShareTrained
from tests.workflows.conftest import Jobs, ScriptedCluster
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox

JOBS = 4
"""Which of a query and a task a worker takes first is chance."""


def of_workflows(client: Client, queue: str) -> Worker:
    """A worker that caches what it runs, as those of a cluster do."""
    runner = sandbox()
    worker = Worker(client, task_queue=queue, workflows=list(WORKFLOWS), workflow_runner=runner)
    runner.drops_from(worker)
    return worker


async def test_a_query_before_the_task_of_a_dead_worker_leaves_no_run_ahead_of_its_history(temporal: Client) -> None:
    cluster, queue = ScriptedCluster(), uuid.uuid4().hex
    jobs = Jobs(temporal, cluster, queue)
    cluster.blocked.add("confirm 1")
    async with Worker(temporal, task_queue=queue, activities=cluster.activities):
        async with of_workflows(temporal, queue):
            handles = [await jobs.start() for _ in range(JOBS)]
            while cluster.calls.count("confirm 1") < JOBS:  # noqa: ASYNC110 - nobody tells us
                await asyncio.sleep(0.05)
        asked = [asyncio.create_task(handle.query(JobWorkflow.current_state)) for handle in handles]
        await asyncio.sleep(0.5)  # they wait for a worker; there is no task yet
        cluster.blocked.clear()
        for handle in handles:
            await has(handle, tasks=1)
        told = [
            asyncio.create_task(handle.execute_update(JobWorkflow.trained, ShareTrained(ettr=0.9, last_hour=0.8)))
            for handle in handles
        ]
        await asyncio.sleep(0.5)  # the task takes it along
        async with of_workflows(temporal, queue):
            await asyncio.gather(*asked)
            assert await asyncio.gather(*told) == ["shown"] * JOBS
            for handle in handles:
                await jobs.until(handle, lambda state: state.status == "running" and state.ettr == 0.9)
    replayer = Replayer(workflows=WORKFLOWS, data_converter=DATA_CONVERTER, workflow_runner=sandbox())
    for handle in handles:
        await replayer.replay_workflow(await handle.fetch_history())
        await handle.terminate()


async def has(handle: WorkflowHandle[Any, Any], *, tasks: int) -> None:
    """Wait for workflow tasks that nobody takes."""
    while (await handle.describe()).raw_description.pending_workflow_task.attempt < tasks:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
