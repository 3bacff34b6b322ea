"""Provision machines: the pool asks its cluster for more machines."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from activities.activity import FEW_TRIES, Activity, Bounds, within
from activities.heartbeat import Say
from everstep.errors import ConfigError

if TYPE_CHECKING:
    from activities.tools import Tools

LIMIT = timedelta(minutes=1)
"""The time limit of the cluster's answer; the machines themselves may be ready later."""


class ProvisionMachines(Activity[None]):
    """Grow the cluster to a total number of machines; a second run with the same number changes nothing."""

    name = "Provision machines"

    machines: int
    listed: int
    """The number of machines now, for the timeline."""

    def line(self) -> str:
        return f"{self.machines} in total, {self.machines - self.listed} of them new"

    def bounds(self) -> Bounds:
        return within(LIMIT, FEW_TRIES)

    async def perform(self, tools: Tools, say: Say) -> None:
        if tools.cluster is None:
            raise ConfigError("this worker has no list of the cluster's machines, so it cannot add any")
        await tools.cluster.provision(self.machines)
