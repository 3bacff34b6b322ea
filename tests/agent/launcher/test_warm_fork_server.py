"""The warm fork server is kept ready. A machine that waits for a job reports that it is ready, or why it is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent.launcher import fork_servers
from agent.launcher.fork_client import ForkServerClient
from agent.launcher.fork_servers import ForkServers
from everstep.errors import AgentError
from tests import templates
from tests.agent.agents import RunningAgent, alive, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "CHECK_S", 0.05)
    monkeypatch.setattr(fork_servers, "CHECK_LIMIT_S", 1.0)
    monkeypatch.setattr(fork_servers, "AGAIN_S", (0.05, 60.0))


@contextlib.asynccontextmanager
async def looked_after(folder: Path) -> AsyncIterator[ForkServers]:
    servers = ForkServers(folder / "servers", prewarm=True, template=templates.shared())
    looking = asyncio.create_task(servers.keep_warm())
    servers.warm_up()
    try:
        yield servers
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await servers.close(end_warm=True)


async def ready(servers: ForkServers, *, but: int = 0) -> ForkServerClient:
    await until(lambda: servers.warm is not None and servers.warm.pid != but, "a warm fork server is ready")
    assert servers.warm is not None and servers.problem == ""
    return servers.warm


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_that_dies_or_hangs_is_replaced(tmp_path: Path, number: signal.Signals) -> None:
    async with looked_after(tmp_path) as servers:
        first = await ready(servers)
        os.kill(first.pid, number)
        second = await ready(servers, but=first.pid)
        await until(lambda: not alive(first.pid), "the first fork server is gone")
        taken = await servers.assign("gpt", "", {})
        assert taken is second
        os.kill(taken.pid, signal.SIGKILL)
        await until(lambda: taken.lost, "the death of the job's fork server is known")
        await asyncio.sleep(0.3)
        assert servers.warm is None, "the death of a job's fork server starts no warm one"
        await taken.end()


@pytest.mark.usefixtures("often")
async def test_what_keeps_it_from_starting_is_told_until_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failing = ForkServerClient.start, [True]

    async def sometimes(*given: Any) -> ForkServerClient:
        if failing:
            raise AgentError("the fork server did not start: No module named 'torch'")
        return await start(*given)

    monkeypatch.setattr(ForkServerClient, "start", sometimes)
    async with looked_after(tmp_path) as servers:
        await until(lambda: "No module named 'torch'" in servers.problem, "the problem is reported")
        assert servers.warm is None
        failing.clear()
        await ready(servers)


async def test_a_machine_says_that_it_is_ready_and_what_it_has(agent: RunningAgent) -> None:
    async def is_ready() -> bool:
        return (await agent.client.describe()).warm.ready

    while not await is_ready():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)
    import torch

    warm = (await agent.client.describe()).warm
    assert warm.problem == ""
    assert warm.libraries["torch"] == str(torch.__version__)
    assert warm.libraries.keys() == {"python", "numpy", "torch"}
