"""Watching a launch until it steps, with agents that say what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from activities.agents.confirm import confirm_steps
from activities.messages import ConfirmInput
from agent.client import AgentPool
from agent.v1 import agent_pb2 as pb
from agent.v1 import agent_pb2_grpc
from everstep.model.incident import Launched
from everstep.model.job import JobSpec
from tests.activities.spoken import serving


class Shows(agent_pb2_grpc.AgentServicer):
    """An agent with one rank of a generation, which never steps; generation 0: it knows of no job."""

    def __init__(self, rank: int, *generations: int) -> None:
        self.replies = [
            pb.ProgressReply(
                generation=generation,
                ranks=[pb.RankProgress(rank=rank, generation=generation, alive=True, attached=True)]
                if generation
                else [],
            )
            for generation in generations
        ]

    async def Progress(self, request: Any, context: Any) -> AsyncIterator[pb.ProgressReply]:  # noqa: N802
        for reply in self.replies:
            yield reply
            await asyncio.sleep(0.01)
        await asyncio.sleep(600)


async def test_a_machine_that_knows_nothing_of_its_launch_was_lost() -> None:
    spec = JobSpec(name="job", script="/job.py", machines=2)
    async with serving([Shows(0, 2), Shows(1, 2, 0)]) as machines:  # type: ignore[abstract]
        given = ConfirmInput(
            spec=spec, machines=machines, launched=Launched(generation=2, resume_step=20, started_ns=1)
        )
        pool = AgentPool()
        verdict = await asyncio.wait_for(confirm_steps(pool, given), 30)
        await pool.close()
    assert (verdict.ok, verdict.emptied) == (False, ["m1"])
