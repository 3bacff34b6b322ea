"""A pool that has too few machines has its cluster grow."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from activities.activity import FEW_TRIES, Activity, Bounds, within
from activities.heartbeat import Say
from everstep.errors import ConfigError

if TYPE_CHECKING:
    from activities.tools import Tools

LIMIT = timedelta(minutes=1)
"""A cluster that was asked for machines has answered within this time: the machines may come later."""


class ProvisionMachines(Activity[None]):
    """Have so many machines in all. It may be done twice: the number is of all machines, not of new ones."""

    name = "Provision machines"

    machines: int
    listed: int
    """So many there are, for people."""

    def line(self) -> str:
        return f"{self.machines} in all: {self.machines - self.listed} more than there are"

    def bounds(self) -> Bounds:
        return within(LIMIT, FEW_TRIES)

    async def perform(self, tools: Tools, say: Say) -> None:
        if tools.cluster is None:
            raise ConfigError("nothing lists the machines of this cluster")
        await tools.cluster.provision(self.machines)
