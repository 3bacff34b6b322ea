"""Activities on ranks against a real agent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.messages import LaunchInput, ReleaseInput, StopInput
from activities.ranks import RankActivities
from agent.client import AgentPool
from everstep.job import JobSpec
from everstep.machine import Machine
from tests.agent.agents import running_agent


async def test_a_machine_that_was_never_prepared_takes_part_in_a_reattempt(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import time\ntime.sleep(600)\n")
    spec = JobSpec(name="late", script=str(script))
    async with running_agent(tmp_path / "agent") as agent:
        machines, pool = [Machine(name="m1", address=agent.address)], AgentPool()
        ranks = RankActivities(pool)
        environment = ActivityEnvironment()
        # Its agent was silent when the job was prepared: the incident's stop is the first that it hears.
        await environment.run(ranks.stop, StopInput(job="late", generation=1, machines=machines))
        launched = await asyncio.wait_for(
            environment.run(ranks.launch, LaunchInput(spec=spec, machines=machines, generation=2, resume_step=0)), 60
        )
        assert launched.generation == 2
        living = [rank.alive for job in (await agent.client.describe()).jobs for rank in job.ranks]
        assert living == [True]
        await environment.run(ranks.release, ReleaseInput(job="late", machines=machines))
        with pytest.raises(ApplicationError, match="over"):  # an attempt that comes too late starts nothing
            await environment.run(ranks.launch, LaunchInput(spec=spec, machines=machines, generation=3, resume_step=0))
        await pool.close()
