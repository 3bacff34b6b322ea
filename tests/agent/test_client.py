"""Connections to agents: distant agents, many at once, and agents that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from agent import client as client_module
from agent.client import CONNECTING, AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from tests.activities.spoken import serving


class Slow:
    """A proxy in front of an agent. It delays the first byte of each connection."""

    def __init__(self, agent: str, delay_s: float) -> None:
        self._host, _, port = agent.rpartition(":")
        self._port = int(port)
        self._delay_s = delay_s
        self._open: list[tuple[asyncio.Task[None], asyncio.StreamWriter]] = []
        self.waiting = self.most = self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.append((task, writer))
        self.connections += 1
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(self._delay_s)
        self.waiting -= 1
        with contextlib.suppress(OSError):
            from_agent, to_agent = await asyncio.open_connection(self._host, self._port)
            self._open.append((task, to_agent))
            await asyncio.gather(_pass(reader, to_agent), _pass(from_agent, writer))

    async def close(self) -> None:
        for task, writer in self._open:
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*(task for task, _ in self._open), return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def slow_agent(delay_s: float) -> AsyncIterator[tuple[Slow, int]]:
    """Run an agent behind a slow proxy on every loopback address. Yields the proxy and its port."""
    async with serving([FakeAgent(describe=pb.DescribeReply(machine="m0"))]) as [machine]:
        slow = Slow(machine.address, delay_s)
        server = await asyncio.start_server(slow.serve, "0.0.0.0", 0)
        try:
            yield slow, server.sockets[0].getsockname()[1]
        finally:
            server.close()
            await slow.close()


@pytest.fixture
async def pool() -> AsyncIterator[AgentClients]:
    found = AgentClients()
    yield found
    await found.close()


async def test_an_agent_that_is_slow_to_connect_is_reached(pool: AgentClients) -> None:
    async with slow_agent(0.5) as (slow, port):
        assert (await pool.get(f"127.0.0.1:{port}").describe(timeout_s=60)).machine == "m0"
        assert slow.connections == 1, "the client did not give up the first connection"


async def test_a_pool_connects_to_many_agents_a_few_at_a_time(
    pool: AgentClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "TURN_S", 3600.0)
    async with slow_agent(0.05) as (slow, port):
        agents = [pool.get(f"127.0.{1 + n // 200}.{1 + n % 200}:{port}") for n in range(4 * CONNECTING)]
        found = await asyncio.gather(*(agent.describe(timeout_s=60) for agent in agents))

        assert [one.machine for one in found] == ["m0"] * len(agents)
        assert slow.connections == len(agents)
        assert slow.most <= CONNECTING


async def test_machines_that_do_not_answer_delay_no_call_to_others(pool: AgentClients) -> None:
    async with slow_agent(3600) as (_, hanging), slow_agent(0) as (_, port):
        gone = [pool.get(f"127.0.{1 + n // 200}.{1 + n % 200}:{hanging}") for n in range(3 * CONNECTING)]
        calls = [asyncio.create_task(agent.describe(timeout_s=60)) for agent in gone]
        await asyncio.sleep(0)
        assert (await pool.get(f"127.0.0.1:{port}").describe(timeout_s=60)).machine == "m0"
        assert not any(call.done() for call in calls), (
            "all calls to silent machines still wait when the call to the live agent ends"
        )
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
