"""A watcher between real workflows and fake agents."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from activities.watching.watcher import Watcher
from agent.client import AgentClients
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, job_workflow_id
from everstep.model.machine import Machine
from tests.activities.spoken import serving
from tests.activities.watching.spoken_agent import SpokenAgent
from tests.workflows.conftest import ScriptedCluster
from workflows.job import JobWorkflow
from workflows.messages import JobResult
from workflows.registry import WORKFLOWS, sandbox


@dataclass
class Place:
    """Two fake agents, a scripted cluster and a watcher."""

    client: Client
    queue: str
    machines: list[Machine]
    agents: list[SpokenAgent]
    cluster: ScriptedCluster
    worker: Worker

    async def start(self, name: str, machines: int, **checkpoint: float) -> WorkflowHandle[JobWorkflow, JobResult]:
        """Start a job of one rank on each machine."""
        policy = CheckpointPolicy.model_validate(checkpoint)
        spec = JobSpec(name=name, script="/job.py", machines=machines, checkpoint=policy)
        return await self.client.start_workflow(
            JobWorkflow.run,
            JobState(spec=spec, machines=self.machines[:machines]),
            id=job_workflow_id(name),
            task_queue=self.queue,
        )

    async def begin(self, name: str, state: object, *, other: str = "") -> None:
        """Start a job whose workflow answers queries with ``state``. ``other``: its queue is of another cluster."""
        await self.client.start_workflow("Job", state, id=job_workflow_id(name), task_queue=self.queue + other)

    async def until_watched(self, listeners: int) -> None:
        """Wait until the watcher listens to a number of agents."""
        while sum(agent.open("observe") for agent in self.agents) != listeners:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)


def worker_of(client: Client, queue: str, cluster: ScriptedCluster) -> Worker:
    return Worker(
        client,
        task_queue=queue,
        workflows=list(WORKFLOWS),
        activities=cluster.activities,
        workflow_runner=sandbox(),
    )


@pytest.fixture
async def place(temporal: Client) -> AsyncIterator[Place]:
    agents = [SpokenAgent(f"m{number}") for number in range(2)]
    queue, cluster, pool = f"q-{uuid.uuid4().hex[:8]}", ScriptedCluster(), AgentClients()
    async with serving(agents) as machines, worker_of(temporal, queue, cluster) as worker:
        found = Place(temporal, queue, machines, agents, cluster, worker)
        watching = asyncio.create_task(Watcher(temporal, pool, queue).run())
        yield found
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    await pool.close()


@contextlib.asynccontextmanager
async def cancelled_at_the_end(*running: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one) for one in running]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
