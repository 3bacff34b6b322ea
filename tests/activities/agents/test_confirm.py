"""Watching a launch until it steps, with agents that say what a test wants."""

from __future__ import annotations

import asyncio

from activities.agents.confirm import confirm_steps
from activities.messages import ConfirmInput
from agent.client import AgentPool
from agent.fake import NEVER, FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.model.incident import Launched
from everstep.model.job import JobSpec
from tests.activities.spoken import serving


def shows(rank: int, *generations: int) -> FakeAgent:
    """An agent with one rank of a generation, which never steps; generation 0: it knows of no job."""
    ranks = [pb.RankProgress(rank=rank, generation=one, alive=True, attached=True) for one in generations]
    replies = [pb.ProgressReply(generation=one.generation, ranks=[one] if one.generation else []) for one in ranks]
    return FakeAgent(progress=[*replies, NEVER])


async def test_a_machine_that_knows_nothing_of_its_launch_was_lost() -> None:
    spec = JobSpec(name="job", script="/job.py", machines=2)
    async with serving([shows(0, 2), shows(1, 2, 0)]) as machines:
        given = ConfirmInput(
            spec=spec, machines=machines, launched=Launched(generation=2, resume_step=20, started_ns=1)
        )
        pool = AgentPool()
        verdict = await asyncio.wait_for(confirm_steps(pool, given), 30)
        await pool.close()
    assert (verdict.ok, verdict.emptied) == (False, ["m1"])
