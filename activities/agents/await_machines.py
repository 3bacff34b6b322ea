"""Await machines: wait for machines that did not answer."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import Activity, Bounds, awaiting, not_yet
from activities.heartbeat import Say
from everstep.base.text import listed
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient

QUESTION = timedelta(seconds=30)
"""The time limit of one question to all machines."""


class AwaitMachines(Activity[None]):
    """Wait until the machines answer; it fails if they do not answer in time."""

    name = "Await machines"

    machines: list[Machine]
    patience_s: float
    """The longest wait, seconds."""

    def line(self) -> str:
        return listed([machine.name for machine in self.machines])

    def bounds(self) -> Bounds:
        return awaiting(QUESTION, timedelta(seconds=self.patience_s))

    async def perform(self, tools: Tools, say: Say) -> None:
        from activities.agents.call_all import on_all, waiting_text

        async def describe(_machine: Machine, client: AgentClient) -> str:
            return str((await client.describe()).machine)

        _, silent = await on_all(tools.agents, self.machines, describe, say=say, patience_s=0.0)
        if silent:
            raise not_yet(waiting_text(silent), activity.info().attempt)
