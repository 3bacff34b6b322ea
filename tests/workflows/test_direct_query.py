"""Direct queries, which no workflow task carries.

A run that answers a direct query must not get ahead of its history, since otherwise it cannot be replayed. By chance, a
worker may accept the query or the task first. So each test has several jobs or updates.
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Replayer, Worker

from activities.ledger.ledger import Ledger
from activities.payloads import DATA_CONVERTER
from activities.tools import Tools
from agent.client import AgentClients
from controlplane.worker import build
from everstep.model.job_state import ShareTrained
from tests.workflows.conftest import Jobs, ScriptedCluster
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox

JOBS = 4
UPDATES = 40


async def test_a_query_before_the_task_of_a_dead_worker_leaves_no_run_ahead_of_its_history(
    temporal: Client, tmp_path: Path
) -> None:
    cluster, queue = ScriptedCluster(), uuid.uuid4().hex
    jobs = Jobs(temporal, cluster, queue)
    cluster.blocked.add("confirm 1")
    async with Worker(temporal, task_queue=queue, activities=cluster.activities):
        async with Worker(temporal, task_queue=queue, workflows=list(WORKFLOWS), workflow_runner=sandbox()):
            handles = [await jobs.start() for _ in range(JOBS)]
            while cluster.calls.count("confirm 1") < JOBS:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)
        asked = [asyncio.create_task(handle.query(JobWorkflow.current_state)) for handle in handles]
        await asyncio.sleep(0.5)  # the queries wait for a worker before there is a task
        cluster.blocked.clear()
        for handle in handles:
            await has_task(handle)
        told = [
            asyncio.create_task(handle.execute_update(JobWorkflow.trained, ShareTrained(ettr=0.9, last_hour=0.8)))
            for handle in handles
        ]
        await asyncio.sleep(0.5)  # the pending task then carries the update
        other = await Client.connect(temporal.service_client.config.target_host, data_converter=DATA_CONVERTER)
        with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
            async with build(other, Tools(AgentClients(), ledger), task_queue=queue):
                await asyncio.gather(*asked)
                assert await asyncio.gather(*told) == ["shown"] * JOBS
                for handle in handles:
                    await jobs.until(handle, lambda state: state.status == "running" and state.ettr == 0.9)
    replayer = Replayer(workflows=WORKFLOWS, data_converter=DATA_CONVERTER, workflow_runner=sandbox())
    for handle in handles:
        await replayer.replay_workflow(await handle.fetch_history())
        await handle.terminate()


async def has_task(handle: WorkflowHandle[Any, Any]) -> None:
    """Wait until a workflow has a pending task, while no worker runs."""
    while not (await handle.describe()).raw_description.HasField("pending_workflow_task"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_an_update_beside_a_query_is_taken(temporal: Client) -> None:
    """The history that is sent with a query may already have the begin of the update's task, before it is recorded."""
    cluster, queue, runner = ScriptedCluster(), uuid.uuid4().hex, sandbox()
    jobs, flows = Jobs(temporal, cluster, queue), list(WORKFLOWS)
    worker = Worker(temporal, task_queue=queue, workflows=flows, activities=cluster.activities, workflow_runner=runner)
    runner.drops_from(worker)
    async with worker:
        handle = await jobs.start()
        await jobs.until(handle, lambda state: state.status == "running")
        over = asyncio.Event()

        async def ask() -> None:
            while not over.is_set():
                await handle.query(JobWorkflow.current_state)

        asking = asyncio.create_task(ask())
        for i in range(UPDATES):
            share = ShareTrained(ettr=i / UPDATES, last_hour=0.8)
            assert await handle.execute_update(JobWorkflow.trained, share) == "shown"
        over.set()
        await asking
    replayer = Replayer(workflows=flows, data_converter=DATA_CONVERTER, workflow_runner=sandbox())
    await replayer.replay_workflow(await handle.fetch_history())
    await handle.terminate()
