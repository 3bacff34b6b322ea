"""Machines that a file lists: those of a local cluster, or of an inventory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from activities.clusters.cluster import Listing


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
