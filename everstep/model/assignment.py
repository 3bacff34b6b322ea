"""Which machine runs which ranks of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from everstep.model.topology import Topology

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Assignment(Generic[M]):
    """Ranks ↔ machines of one job.

    Args:
        topology: Of the job.
        machines: Those that run it, in the topology's order: their names, or ``Machine`` where addresses matter.
    """

    topology: Topology
    machines: Sequence[M]

    def home(self, rank: int) -> M:
        """The machine that runs a rank.

        Raises:
            TopologyError: there is no such rank.
        """
        return self.machines[self.topology.machine(rank)]

    def homes(self) -> dict[int, M]:
        """Every rank → the machine that runs it."""
        return {rank: machine for machine, ranks in self.each() for rank in ranks}

    def each(self) -> Iterator[tuple[M, tuple[int, ...]]]:
        """Every machine with its ranks, in order."""
        return ((machine, self.topology.ranks(index)) for index, machine in enumerate(self.machines))
