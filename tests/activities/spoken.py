"""Serves fake agents as the machines of a test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from agent.client import AgentClients
from agent.fake import FakeAgent
from everstep.model.machine import Machine
from tests.hosts import own_host

HOST = own_host(31)


@contextlib.asynccontextmanager
async def serving(agents: Sequence[FakeAgent]) -> AsyncIterator[list[Machine]]:
    """Serve each agent on its own port. Yields the machines m0, m1, …"""
    async with contextlib.AsyncExitStack() as stack:
        for agent in agents:
            await agent.start(f"{HOST}:0")
            stack.push_async_callback(agent.stop)
        yield [Machine(name=f"m{number}", address=agent.address) for number, agent in enumerate(agents)]


@contextlib.asynccontextmanager
async def reached(agents: Sequence[FakeAgent]) -> AsyncIterator[tuple[AgentClients, list[Machine]]]:
    """Serve the agents. Yields clients for them, and their machines m0, m1, …"""
    pool = AgentClients()
    async with serving(agents) as machines:
        try:
            yield pool, machines
        finally:
            await pool.close()
