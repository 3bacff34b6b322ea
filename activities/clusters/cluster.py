"""What every kind of cluster can say and do about its machines."""

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


class Cluster(Protocol):
    """A cluster. Each call may come twice, and has the same effect then; none blocks the event loop."""

    async def list(self) -> Listing:
        """All machines that there are.

        Raises:
            EverstepError: it is not known now; the error says why.
        """
        ...

    async def provision(self, count: int) -> int:
        """Ask for further machines; they are listed once they are there.

        Args:
            count: So many are missing in all, those included that were asked for before.

        Returns:
            How many are on their way.

        Raises:
            EverstepError: nobody can be asked now.
        """
        ...

    async def cordon(self, machine: Machine, reason: str) -> None:
        """Have nothing placed on a machine any more by whoever else places work there.

        Raises:
            EverstepError: nobody can be told now.
        """
        ...

    async def release(self, machine: Machine) -> None:
        """Take a cordon back.

        Raises:
            EverstepError: nobody can be told now.
        """
        ...
