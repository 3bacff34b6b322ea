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


class Cluster(Protocol):
    """A cluster. A call does not block the event loop."""

    async def list(self) -> Listing:
        """All machines that there are.

        Raises:
            EverstepError: it is not known now; the error says why.
        """
        ...
