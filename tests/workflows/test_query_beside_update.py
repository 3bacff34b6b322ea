"""A query beside an update, of a run that its worker has not in its cache: the update is taken, and the run replays."""

from __future__ import annotations

import asyncio
import uuid

from temporalio.client import Client
from temporalio.worker import Replayer, Worker

from activities.payloads import DATA_CONVERTER
from everstep.model.job_state import ShareTrained
from tests.workflows.conftest import Jobs, ScriptedCluster
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox

TOLD = 40
"""Which of a query and a task a worker takes first is chance."""


async def test_an_update_beside_a_query_is_taken(temporal: Client) -> None:
    """The history that answers a query may have the begin of the update's task, which is no event yet."""
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
        for i in range(TOLD):
            share = ShareTrained(ettr=i / TOLD, last_hour=0.8)
            assert await handle.execute_update(JobWorkflow.trained, share) == "shown"
        over.set()
        await asking
    replayer = Replayer(workflows=flows, data_converter=DATA_CONVERTER, workflow_runner=sandbox())
    await replayer.replay_workflow(await handle.fetch_history())
    await handle.terminate()
