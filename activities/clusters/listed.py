"""Clusters whose machines are listed in a file: a local cluster, or an inventory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from activities.clusters.cluster import Listing
from everstep.errors import ConfigError


class ListedCluster:
    """A cluster in a file: only everstep places work on its machines."""

    def __init__(self, read: Callable[[], Listing], grow: Callable[[int], Awaitable[None]] | None = None) -> None:
        """Create the cluster.

        Args:
            read: Reads the file each time, so a change has effect at once. It may block, and raises EverstepError.
            grow: Grows the cluster to a number of machines, see :meth:`provision`; None: it cannot grow.
        """
        self._read = read
        self._grow = grow

    async def list(self) -> Listing:
        """Return the current list."""
        return await asyncio.to_thread(self._read)

    async def provision(self, machines: int) -> None:
        """Grow the list to a number of machines."""
        if self._grow is None:
            raise ConfigError("nothing says how the cluster gets more machines")
        await self._grow(machines)
