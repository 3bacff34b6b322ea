"""A finding is cleared on a real agent after a repair. The answer comes after the machine was inspected again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent.v1 import agent_pb2 as pb
from tests.agent.agents import RunningAgent

MONITOR = """
[[check]]
name = "cables"
command = ["test", "!", "-e", "{fault}"]
interval_s = 3600
"""
"""The check ends with exit code 1, a warning, as long as the file exists."""


async def test_what_is_asked_after_a_clearing_is_the_state_after_it(tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    fault.touch()
    agent = RunningAgent(tmp_path / "agent", monitor=MONITOR.format(fault=fault))

    async def cables() -> pb.InspectionState:
        return next(state for state in (await agent.client.inspect()).inspections if state.name == "cables")

    await agent.start()
    try:
        while not (await cables()).findings:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
        assert (await agent.client.clear("cables")).cleared == 1
        assert len((await cables()).findings) == 1, "the fault is still there, so it is found again"
        fault.unlink()
        assert (await agent.client.clear("cables")).cleared == 1
        assert (await cables()).verdict == "healthy"
        assert (await agent.client.clear("cables")).cleared == 0
    finally:
        await agent.close()
