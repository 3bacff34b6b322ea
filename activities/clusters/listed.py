"""Machines that a file lists: those of a local cluster, or of an inventory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from activities.clusters.cluster import Listing
from everstep.model.machine import Machine


class ListedCluster:
    """A list that a person keeps: it does not grow by itself, and everstep alone places work on its machines."""

    def __init__(self, read: Callable[[], Listing]) -> None:
        """Use a list.

        Args:
            read: Reads it anew, so that a change counts at once. May block; raises EverstepError where it cannot.
        """
        self._read = read

    async def list(self) -> Listing:
        """The list as it is now."""
        return await asyncio.to_thread(self._read)

    async def provision(self, count: int) -> int:
        """None are on their way: a person adds machines to the list."""
        return 0

    async def cordon(self, machine: Machine, reason: str) -> None:
        """Nobody else places work there."""

    async def release(self, machine: Machine) -> None:
        """Nobody else places work there."""
