"""The interface that every kind of cluster implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
        """Grow the cluster to a number of machines: new ones appear in the list, and are ready some time later.

        A repeated call changes nothing, nor does a call when there are as many machines already.

        Args:
            machines: The total number, at most :attr:`Listing.at_most`.

        Raises:
            EverstepError: the cluster cannot grow now; the error says why.
        """
        ...
