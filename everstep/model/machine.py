"""Defines machines with the addresses of their agents, and the ranks of a job that each machine runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from everstep.base.addresses import parse_address
from everstep.model.topology import Topology

M = TypeVar("M")


class Machine(BaseModel):
    """One machine, and the address of its agent."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    address: str
    """``host:port`` of the agent's gRPC server; an IPv6 address is in brackets."""
    domain: str = ""
    """Failure domain, e.g. its switch or rack; empty: not known."""

    @property
    def host(self) -> str:
        """The host part of the address, without brackets."""
        return parse_address(self.address).host


@dataclass(frozen=True, slots=True)
class Assignment(Generic[M]):
    """The map between the ranks and the machines of one job.

    Args:
        topology: The job's topology.
        machines: The job's machines in the topology's order: names, or ``Machine`` objects where addresses matter.
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
