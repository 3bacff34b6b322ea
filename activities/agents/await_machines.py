"""Await machines: wait for machines that did not answer."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say
from everstep.base.text import listed
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient


class AwaitMachines(Activity[list[str]]):
    """Wait until the machines answer; the result is the list of machines that did not answer in time."""

    name = "Await machines"

    machines: list[Machine]
    patience_s: float
    """The longest wait, seconds."""

    def line(self) -> str:
        return listed([machine.name for machine in self.machines])

    def bounds(self) -> Bounds:
        return twice(timedelta(seconds=self.patience_s) + timedelta(minutes=1))

    async def perform(self, tools: Tools, say: Say) -> list[str]:
        from activities.agents.call_all import on_all

        async def describe(_machine: Machine, client: AgentClient) -> str:
            return str((await client.describe()).machine)

        _, silent = await on_all(tools.agents, self.machines, describe, say=say, patience_s=self.patience_s)
        return list(silent)
