"""The interface of all kinds of clusters, and the kind of cluster whose machines are listed in a file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from everstep.errors import ConfigError
from everstep.model.machine import Machine


@dataclass(frozen=True, slots=True)
class Listing:
    """The list of a cluster's machines."""

    machines: list[Machine]
    """All machines, with their failure domains; the standbys are last."""
    standbys: int
    """The number of machines at the end of the list that are standbys."""
    at_most: int = 0
    """The cluster can grow up to this many machines; 0: it cannot grow."""


class Cluster(Protocol):
    """A cluster of machines. Its methods do not block the event loop."""

    async def list(self) -> Listing:
        """Return all machines of the cluster.

        Raises:
            EverstepError: the list is not available now; the error says why.
        """
        ...

    async def provision(self, machines: int) -> None:
        """Grow the cluster to a number of machines: new machines appear in the list, and are ready some time later.

        A repeated call changes nothing. A call for no more machines than the cluster has changes nothing either.

        Args:
            machines: The total number, at most :attr:`Listing.at_most`.

        Raises:
            EverstepError: the cluster cannot grow now; the error says why.
        """
        ...


class ListedCluster:
    """A cluster in a file: only everstep places work on its machines."""

    def __init__(self, read: Callable[[], Listing], grow: Callable[[int], Awaitable[None]] | None = None) -> None:
        """Create the cluster.

        Args:
            read: Reads the file. It is called each time, so a change of the file has effect at once. It may block, and
                raises EverstepError.
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
            raise ConfigError("no command is configured that adds machines to the cluster")
        await self._grow(machines)
