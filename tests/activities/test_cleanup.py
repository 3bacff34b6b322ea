"""Remains of a job whose workflow is over, on a real agent."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from activities.cleanup import Cleanup
from agent.client import AgentPool
from everstep.job import JobSpec
from everstep.job_state import JobState, job_workflow_id
from everstep.machine import Machine
from tests.agent.agents import Job, alive, running_agent
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox


async def test_ranks_of_a_terminated_job_are_ended_once_their_agent_answers(temporal: Client, tmp_path: Path) -> None:
    queue = f"q-{uuid.uuid4().hex[:8]}"
    async with (
        running_agent(tmp_path) as agent,
        Worker(temporal, task_queue=queue, workflows=list(WORKFLOWS), workflow_runner=sandbox()),
    ):
        job, pool = Job(agent, "import time; time.sleep(600)\n", ranks=1), AgentPool()
        await job.prepare()
        rank = (await job.launch()).ranks[0].pid
        spec = JobSpec(name=job.name, script=str(job.path))
        handle = await temporal.start_workflow(
            JobWorkflow.run,
            JobState(spec=spec, machines=[Machine(name="m1", address=agent.address)], generation=1),
            id=job_workflow_id(job.name),
            task_queue=queue,
        )
        await handle.query(JobWorkflow.current_state)
        cleanup = Cleanup(temporal, pool, settle=timedelta(0))
        await cleanup.look()
        assert alive(rank), "its job runs"
        await handle.terminate("by hand")
        agent.kill()
        await cleanup.look()
        assert alive(rank), "its agent is dead"
        await agent.start()
        while alive(rank):
            await cleanup.look()
            await asyncio.sleep(0.1)
        assert not list(agent.shm.iterdir())
        await pool.close()
