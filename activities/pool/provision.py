"""Asking the cluster for machines."""

from __future__ import annotations

from temporalio import activity

from activities import messages
from activities.clusters.cluster import Cluster
from activities.heartbeat import heartbeating
from everstep.errors import ConfigError


class ProvisionActivities:
    """Has a cluster grow."""

    def __init__(self, cluster: Cluster | None) -> None:
        """Use a cluster; None: nothing lists the machines, so there are no others."""
        self._cluster = cluster

    @activity.defn(name=messages.POOL_PROVISION)
    async def provision(self, machines: int) -> None:
        """Have so many machines in all. It may be done twice: the number is of all machines, not of new ones."""
        if self._cluster is None:
            raise ConfigError("nothing lists the machines of this cluster")
        async with heartbeating():
            await self._cluster.provision(machines)
