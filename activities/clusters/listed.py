"""Machines that a file lists: those of a local cluster, or of an inventory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from activities.clusters.cluster import Listing
from everstep.errors import ConfigError


class ListedCluster:
    """A list that lies in a file: everstep alone places work on its machines."""

    def __init__(self, read: Callable[[], Listing], grow: Callable[[int], Awaitable[None]] | None = None) -> None:
        """Use a list.

        Args:
            read: Reads it anew, so that a change counts at once. May block; raises EverstepError where it cannot.
            grow: Has it have so many machines, as :meth:`provision` says; None: it does not grow.
        """
        self._read = read
        self._grow = grow

    async def list(self) -> Listing:
        """The list as it is now."""
        return await asyncio.to_thread(self._read)

    async def provision(self, machines: int) -> None:
        """Have so many machines in the list."""
        if self._grow is None:
            raise ConfigError("nothing says how the cluster gets more machines")
        await self._grow(machines)
