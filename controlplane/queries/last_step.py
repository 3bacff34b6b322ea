"""The last step of a job that has ended, from the step records of its agents."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress

from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError
from everstep.model.machine import Machine

PATIENCE_S = 2.0


async def last_step(
    agents: AgentClients, job: str, machines: Sequence[Machine], *, from_step: int = 0
) -> tuple[int | None, float | None]:
    """The number of completed steps and the last loss; None: no record has them.

    Args:
        agents: Clients of the agents.
        job: Name of the job.
        machines: Machines of the job.
        from_step: First step whose records are requested.
    """

    async def read_records(machine: Machine) -> list[pb.StepRecord]:
        request = pb.StepsRequest(job=job, rank=-1, from_step=from_step)
        with suppress(AgentError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                return [
                    record async for reply in agents.get(machine.address).steps(request) for record in reply.records
                ]
        return []

    replies = await asyncio.gather(*(read_records(machine) for machine in machines))
    records = [record for kept in replies for record in kept]
    if not records:
        return None, None
    last = max(record.step for record in records)
    losses = [record.loss for record in records if record.step == last and math.isfinite(record.loss)]
    return last + 1, losses[0] if losses else None
