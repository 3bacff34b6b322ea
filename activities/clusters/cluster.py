"""What every kind of cluster can say of its machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from everstep.model.machine import Machine


@dataclass(frozen=True, slots=True)
class Listing:
    """The machines of a cluster."""

    machines: list[Machine]
    """All of them, with their failure domains; the standbys last."""
    standbys: int
    """So many of the last ones are kept for replacement."""
    at_most: int = 0
    """The cluster can be asked for machines until it has so many; 0: it does not grow by itself."""


class Cluster(Protocol):
    """A cluster. A call does not block the event loop."""

    async def list(self) -> Listing:
        """All machines that there are.

        Raises:
            EverstepError: it is not known now; the error says why.
        """
        ...

    async def provision(self, machines: int) -> None:
        """Have so many machines in all: they come into the list, and are fit some time later.

        Asked twice it is the same, and so it is where there are as many already.

        Args:
            machines: At most :attr:`Listing.at_most`.

        Raises:
            EverstepError: it is not possible now; the error says why.
        """
        ...
