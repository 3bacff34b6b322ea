"""Ranks, parallel groups and machines.

A job's ranks form a mesh with the axes ``pp``, ``dp`` and ``tp``. The order of
the axes decides which rank sits where; the last axis varies fastest. The
default, pp-dp-tp, is the order in which torch's ``init_device_mesh("…",
(pp, dp, tp))`` numbers ranks. ByteRobust's figure 7 numbers them dp-pp-tp
(section 5.1), which ``order=("dp", "pp", "tp")`` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from everstep.errors import TopologyError

Axis = Literal["tp", "pp", "dp"]
AXES: tuple[Axis, ...] = get_args(Axis)


class Coordinate(NamedTuple):
    """A rank's place in the mesh."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of a job and the map rank ↔ (tp, pp, dp) ↔ machine.

    Machines are numbered 0 … machines - 1 and hold ``ranks_per_machine``
    consecutive ranks each.

    Raises:
        TopologyError: a size below 1, or tp·pp·dp ≠ machines·ranks_per_machine.
    """

    machines: int
    ranks_per_machine: int
    tp: int = 1
    pp: int = 1
    order: tuple[Axis, ...] = ("pp", "dp", "tp")

    def __post_init__(self) -> None:
        for name in ("machines", "ranks_per_machine", "tp", "pp"):
            value = getattr(self, name)
            if value < 1:
                raise TopologyError(f"{name} is {value}; it must be at least 1")
        if sorted(self.order) != sorted(AXES):
            raise TopologyError(f"order is {'-'.join(self.order)}; it must name tp, pp and dp once each")
        if self.world_size % (self.tp * self.pp):
            raise TopologyError(
                f"{self.machines} machines x {self.ranks_per_machine} ranks = {self.world_size} ranks cannot be split "
                f"into tp {self.tp} x pp {self.pp}: {self.world_size} is not a multiple of {self.tp * self.pp}"
            )

    @classmethod
    def parse(cls, text: str) -> Topology:
        """A topology from what ``str`` makes of it: ``machines,ranks_per_machine,tp,pp,order``.

        Raises:
            TopologyError: it does not read like that, or the sizes make no sense.
        """
        try:
            *sizes, axes = text.split(",")
            machines, ranks_per_machine, tp, pp = map(int, sizes)
        except ValueError:
            raise TopologyError(
                f"the topology is {text!r}; it must read like 4,2,2,2,pp-dp-tp "
                "(machines, ranks per machine, tp, pp, order)"
            ) from None
        return cls(machines, ranks_per_machine, tp, pp, tuple(axes.split("-")))  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The topology in one line, as ranks get it in their environment."""
        return f"{self.machines},{self.ranks_per_machine},{self.tp},{self.pp},{'-'.join(self.order)}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.machines * self.ranks_per_machine

    @property
    def dp(self) -> int:
        """Data-parallel size: what tp and pp leave."""
        return self.world_size // (self.tp * self.pp)

    def size(self, axis: Axis) -> int:
        """Number of ranks along one axis."""
        return self.tp if axis == "tp" else self.pp if axis == "pp" else self.dp

    def coordinate(self, rank: int) -> Coordinate:
        """Place of a rank in the mesh."""
        self._check(rank)
        place: dict[str, int] = {}
        for axis in reversed(self.order):
            rank, place[axis] = divmod(rank, self.size(axis))
        return Coordinate(**place)

    def rank(self, coordinate: Coordinate) -> int:
        """Rank at a place of the mesh."""
        rank = 0
        for axis in self.order:
            at = getattr(coordinate, axis)
            if not 0 <= at < self.size(axis):
                raise TopologyError(f"{axis} {at} does not exist: {axis} goes from 0 to {self.size(axis) - 1}")
            rank = rank * self.size(axis) + at
        return rank

    def group(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """Ranks, ascending, that differ from ``rank`` along ``axis`` only."""
        here = self.coordinate(rank)
        return tuple(sorted(self.rank(here._replace(**{axis: i})) for i in range(self.size(axis))))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All parallel groups of one kind, in order of their lowest rank."""
        return tuple(sorted({self.group(rank, axis) for rank in range(self.world_size)}))

    def machine(self, rank: int) -> int:
        """Index of the machine that holds a rank."""
        self._check(rank)
        return rank // self.ranks_per_machine

    def ranks(self, machine: int) -> tuple[int, ...]:
        """Ranks of one machine, ascending."""
        if not 0 <= machine < self.machines:
            raise TopologyError(f"machine {machine} does not exist: machines go from 0 to {self.machines - 1}")
        first = machine * self.ranks_per_machine
        return tuple(range(first, first + self.ranks_per_machine))

    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes in mesh order, as ``init_device_mesh`` takes them."""
        return tuple(self.size(axis) for axis in self.order)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} does not exist: ranks go from 0 to {self.world_size - 1}")
