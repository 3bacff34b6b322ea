"""Which libraries the fork servers of a job have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from agent.client import AgentClients
from everstep.errors import EverstepError
from everstep.model.machine import Machine

ANSWER_S = 1.0
"""Machines that do not say it within this time are not waited for, seconds."""


async def libraries_of(agents: AgentClients, job: str, machines: Sequence[Machine]) -> dict[str, str]:
    """What a job's fork servers have imported, with versions, as the first machine says that answers.

    Args:
        agents: Clients by address.
        job: Its name.
        machines: On which it was prepared.

    Returns:
        Empty: none of them says it.
    """

    async def ask(machine: Machine) -> dict[str, str]:
        with contextlib.suppress(EverstepError):
            described = await agents.get(machine.address).describe(timeout_s=ANSWER_S)
            return next((dict(here.libraries) for here in described.jobs if here.job == job), {})
        return {}

    asked = [asyncio.create_task(ask(machine)) for machine in machines]
    try:
        for answer in asyncio.as_completed(asked):
            if found := await answer:
                return found
        return {}
    finally:
        for task in asked:
            task.cancel()
