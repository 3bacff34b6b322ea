"""One running agent for a whole module: its fork server takes seconds to import torch."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.agent.agents import RunningAgent, running_agent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningAgent]:
    async with running_agent(tmp_path_factory.mktemp("agent"), "--prewarm") as running:
        yield running
