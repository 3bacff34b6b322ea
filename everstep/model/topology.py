"""Describes the ranks, the parallel groups and the machines of a job.

A job's ranks form a mesh of named axes. The order of the axes decides the coordinate of each rank; the last axis varies
fastest, as in torch's ``init_device_mesh``. The names of axes are free, e.g. ``pp``, ``dp_replicate``, ``dp_shard``,
``cp`` and ``tp``. Axes named ``dp`` or ``dp_…`` are data parallel.

The short form has the axes ``pp``, ``dp`` and ``tp``, in this order by default.
ByteRobust's figure 7 numbers ranks dp-pp-tp (section 5.1).

A *laid* group is not an axis: it joins ranks along several axes. For example, expert-parallel groups of four ranks can
be laid over ``dp_shard`` and ``tp``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Literal, NamedTuple, get_args

from everstep.errors import TopologyError

Axis = Literal["tp", "pp", "dp"]
"""Axes of the short form."""
AXES: tuple[Axis, ...] = get_args(Axis)
SHORT_ORDER: tuple[Axis, ...] = ("pp", "dp", "tp")
THE_REST = -1
"""Size of an axis that has all remaining ranks; at most one axis may have it."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Laid(NamedTuple):
    """A kind of parallel group that is not an axis: each group has ranks along several axes of the mesh."""

    name: str
    size: int
    """Ranks of a group."""
    over: tuple[str, ...]
    """The axes. Ranks that differ only along these axes are split, in mesh order, into groups of ``size``."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's coordinate in the mesh: ``coordinate["dp_shard"]``, and for the most common axes ``coordinate.tp``."""

    places: tuple[tuple[str, int], ...]
    """Axis and index along it, in the order of the mesh."""
    dp: int
    """Index along all data-parallel axes together; 0 where the mesh has none."""

    def __getitem__(self, axis: str) -> int:
        """Index along an axis.

        Raises:
            KeyError: the mesh has no such axis.
        """
        return dict(self.places)[axis]

    @property
    def tp(self) -> int:
        """Index along ``tp``; 0 where the mesh has none."""
        return dict(self.places).get("tp", 0)

    @property
    def pp(self) -> int:
        """Index along ``pp``; 0 where the mesh has none."""
        return dict(self.places).get("pp", 0)


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of a job, and the map between ranks, coordinates in the mesh, and machines.

    Machines are numbered 0 … machines - 1 and have ``ranks_per_machine`` consecutive ranks each.

    Args:
        machines: Number of machines.
        ranks_per_machine: Number of ranks on each machine.
        mesh: Name and size of each axis, in order.
        laid: Kinds of laid groups.

    Raises:
        TopologyError: a size is below 1, a name is invalid or repeated, or the sizes do not multiply to
            machines x ranks_per_machine.
    """

    machines: int
    ranks_per_machine: int
    mesh: tuple[tuple[str, int], ...]
    laid: tuple[Laid, ...] = ()
    _strides: dict[str, int] = field(init=False, repr=False, compare=False)
    """Axis → distance between the ranks that are neighbours along it."""

    def __post_init__(self) -> None:
        for name in ("machines", "ranks_per_machine"):
            if getattr(self, name) < 1:
                raise TopologyError(f"{name} is {getattr(self, name)}; it must be at least 1")
        object.__setattr__(self, "mesh", self._filled())
        strides, stride = {}, 1
        for axis, size in reversed(self.mesh):
            strides[axis], stride = stride, stride * size
        object.__setattr__(self, "_strides", strides)
        self._check_laid()

    @classmethod
    def of(
        cls, machines: int, ranks_per_machine: int, tp: int = 1, pp: int = 1, order: Sequence[Axis] = SHORT_ORDER
    ) -> Topology:
        """A topology in its short form; the data-parallel size follows from the other sizes.

        Raises:
            TopologyError: a size is below 1 or does not divide the number of ranks, or the order is wrong.
        """
        for name, size in (("machines", machines), ("ranks_per_machine", ranks_per_machine), ("tp", tp), ("pp", pp)):
            if size < 1:
                raise TopologyError(f"{name} is {size}; it must be at least 1")
        if sorted(order) != sorted(SHORT_ORDER):
            raise TopologyError(f"order is {'-'.join(order)}; it must name tp, pp and dp once each")
        world_size = machines * ranks_per_machine
        if world_size % (tp * pp):
            raise TopologyError(
                f"{machines} machines x {ranks_per_machine} ranks = {world_size} ranks cannot be split "
                f"into tp {tp} x pp {pp}: {world_size} is not a multiple of {tp * pp}"
            )
        sizes = {"tp": tp, "pp": pp, "dp": world_size // (tp * pp)}
        return cls(machines, ranks_per_machine, tuple((axis, sizes[axis]) for axis in order))

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read a topology from the text that ``str`` makes of it.

        Raises:
            TopologyError: the text has another form, or the sizes make no sense.
        """
        try:
            machines, ranks_per_machine, *rest = text.split(",")
            sizes = int(machines), int(ranks_per_machine)
            if "=" not in text:
                tp, pp, order = rest
                return cls.of(*sizes, int(tp), int(pp), order.split("-"))  # type: ignore[arg-type]
            parts = [part.partition("=")[::2] for part in rest]
            mesh = tuple((name, int(size)) for name, size in parts if ":" not in size)
            laid = tuple(parse_laid(f"{name}={size}") for name, size in parts if ":" in size)
        except ValueError:
            raise TopologyError(
                f"the topology is {text!r}; it must read like 4,2,2,2,pp-dp-tp (machines, ranks per machine, tp, pp, "
                "order) or 4,2,pp=2,dp_shard=2,tp=2,ep=4:dp_shard+tp (machines, ranks per machine, axes, laid groups)"
            ) from None
        return cls(*sizes, mesh, laid)

    def __str__(self) -> str:
        """The topology in one line, as it is written to the environment of ranks and to files on disk."""
        head = f"{self.machines},{self.ranks_per_machine}"
        if self.is_short:
            return f"{head},{self.tp},{self.pp},{'-'.join(self.axes)}"
        axes = [f"{axis}={size}" for axis, size in self.mesh]
        return ",".join([head, *axes, *(f"{kind.name}={kind.size}:{'+'.join(kind.over)}" for kind in self.laid)])

    @property
    def text(self) -> str:
        """The mesh for people: ``pp 2, dp 2, tp 2``."""
        axes = [f"{axis} {size}" for axis, size in self.mesh]
        return ", ".join([*axes, *(f"{kind.name} {kind.size} over {' and '.join(kind.over)}" for kind in self.laid)])

    @property
    def is_short(self) -> bool:
        """Whether the short form can describe it."""
        return sorted(self.axes) == sorted(SHORT_ORDER) and not self.laid

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.machines * self.ranks_per_machine

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, in order."""
        return tuple(axis for axis, _ in self.mesh)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks train on different data: ``dp`` and ``dp_…``."""
        return tuple(filter(_is_data, self.axes))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of parallel groups: the axes and the laid groups."""
        return (*self.axes, *(kind.name for kind in self.laid))

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return dict(self.mesh).get("tp", 1)

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return dict(self.mesh).get("pp", 1)

    @property
    def dp(self) -> int:
        """Data-parallel size: the product of the sizes of all data-parallel axes."""
        return prod(self.size(axis) for axis in self.data_axes)

    def size(self, kind: str) -> int:
        """Number of ranks of a group of a kind.

        Raises:
            TopologyError: there is no such kind.
        """
        sizes = dict(self.mesh) | {laid.name: laid.size for laid in self.laid}
        if kind not in sizes:
            raise TopologyError(f"there are no {kind} groups: the mesh has {', '.join(self.kinds)}")
        return sizes[kind]

    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes in mesh order, as ``init_device_mesh`` expects them."""
        return tuple(size for _, size in self.mesh)

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a rank in the mesh."""
        self._check(rank)
        places, dp = [], 0
        for axis, size in self.mesh:
            index = rank // self._strides[axis] % size
            places.append((axis, index))
            if _is_data(axis):
                dp = dp * size + index
        return Coordinate(tuple(places), dp)

    def rank_at(self, /, **places: int) -> int:
        """The rank at a coordinate, which is given by the index along each axis; an axis that is not given has index 0.

        Raises:
            TopologyError: there is no such axis, or no such index.
        """
        rank = 0
        for axis, index in places.items():
            if axis not in self._strides:
                raise TopologyError(f"there is no axis {axis}: the mesh has {', '.join(self.axes)}")
            if not 0 <= index < self.size(axis):
                raise TopologyError(f"{axis} {index} does not exist: {axis} goes from 0 to {self.size(axis) - 1}")
            rank += index * self._strides[axis]
        return rank

    def first_along(self, rank: int, axes: Sequence[str]) -> int:
        """The lowest rank that differs from ``rank`` along some axes only."""
        self._check(rank)
        return rank - sum(
            rank // self._strides[axis] % size * self._strides[axis] for axis, size in self.mesh if axis in axes
        )

    def along(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Ranks, ascending, that differ from ``rank`` along some axes only."""
        first = self.first_along(rank, axes)
        strides = [(size, self._strides[axis]) for axis, size in self.mesh if axis in axes]
        return tuple(
            first + sum(offsets) for offsets in product(*(range(0, size * stride, stride) for size, stride in strides))
        )

    def group(self, rank: int, kind: str) -> tuple[int, ...]:
        """Ranks, ascending, of the group of a kind to which a rank belongs.

        Raises:
            TopologyError: there is no such rank, or no such kind.
        """
        size = self.size(kind)
        laid = next((laid for laid in self.laid if laid.name == kind), None)
        if laid is None:
            return self.along(rank, [kind])
        ranks = self.along(rank, laid.over)
        first = ranks.index(rank) // size * size
        return ranks[first : first + size]

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """All parallel groups of a kind, in order of their lowest rank."""
        size, over = self.size(kind), {laid.name: laid.over for laid in self.laid}.get(kind, (kind,))
        groups = []
        for rank in range(self.world_size):
            if self.first_along(rank, over) == rank:
                ranks = self.along(rank, over)
                groups += [ranks[first : first + size] for first in range(0, len(ranks), size)]
        return tuple(sorted(groups))

    def same_numbering(self, text: str) -> bool:
        """Whether a topology, given as text, has the same coordinate for every rank; laid groups do not matter."""
        try:
            other = Topology.parse(text)
        except TopologyError:
            return False  # a later release may write another form
        return replace(other, laid=()) == replace(self, laid=())

    def machine(self, rank: int) -> int:
        """Index of the machine that runs a rank."""
        self._check(rank)
        return rank // self.ranks_per_machine

    def local_rank(self, rank: int) -> int:
        """Index of a rank on its machine."""
        self._check(rank)
        return rank % self.ranks_per_machine

    def ranks(self, machine: int) -> tuple[int, ...]:
        """Ranks of a machine, ascending."""
        if not 0 <= machine < self.machines:
            raise TopologyError(f"machine {machine} does not exist: machines go from 0 to {self.machines - 1}")
        first = machine * self.ranks_per_machine
        return tuple(range(first, first + self.ranks_per_machine))

    def _filled(self) -> tuple[tuple[str, int], ...]:
        """The checked mesh, with the size of the axis that has the remaining ranks."""
        wrong = [name for name in (*self.axes, *(kind.name for kind in self.laid)) if not _NAME.fullmatch(name)]
        twice = [name for name, count in Counter(self.kinds).items() if count > 1]
        open_axes = [axis for axis, size in self.mesh if size == THE_REST]
        if wrong_sizes := [axis for axis, size in self.mesh if type(size) is not int]:
            raise TopologyError(
                f"the size of {wrong_sizes[0]} is {dict(self.mesh)[wrong_sizes[0]]!r}; it must be a whole number"
            )
        small = [axis for axis, size in self.mesh if size < 1 and size != THE_REST]
        rest = prod(size for _, size in self.mesh if size >= 1)
        if not self.mesh:
            raise TopologyError("the mesh has no axes: name at least one, as in dp = 8")
        if wrong:
            raise TopologyError(f"{wrong[0]!r} is not the name of an axis: use a-z, 0-9 and _, as in dp_shard")
        if twice:
            raise TopologyError(f"{twice[0]} is in the mesh twice")
        if small or len(open_axes) > 1:
            axis = small[0] if small else open_axes[1]
            raise TopologyError(f"{axis} is {dict(self.mesh)[axis]}; it must be at least 1, or -1 for one axis at most")
        if self.world_size % rest or (self.world_size != rest and not open_axes):
            raise TopologyError(
                f"{self.machines} machines x {self.ranks_per_machine} ranks = {self.world_size} ranks cannot be split "
                f"into {' x '.join(f'{axis} {size}' for axis, size in self.mesh)}"
            )
        return tuple((axis, self.world_size // rest if size == THE_REST else size) for axis, size in self.mesh)

    def _check_laid(self) -> None:
        sizes = dict(self.mesh)
        for kind in self.laid:
            if unknown := [axis for axis in kind.over if axis not in sizes]:
                raise TopologyError(f"{kind.name} is laid over {unknown[0]}: the mesh has {', '.join(self.axes)}")
            if len(set(kind.over)) < len(kind.over):
                raise TopologyError(f"{kind.name} is laid over an axis twice: {' and '.join(kind.over)}")
            ranks = prod(sizes[axis] for axis in kind.over)
            if not kind.over or kind.size < 1 or ranks % kind.size:
                raise TopologyError(
                    f"{kind.name} {kind.size} cannot be laid over {' and '.join(kind.over) or 'nothing'}: the {ranks} "
                    f"ranks there cannot be split into groups of {kind.size}"
                )

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} does not exist: ranks go from 0 to {self.world_size - 1}")


def _is_data(axis: str) -> bool:
    return axis == "dp" or axis.startswith("dp_")


def parse_laid(text: str) -> Laid:
    """Read a kind of laid groups, e.g. ``ep=4:dp_shard+tp``.

    Raises:
        TopologyError: the text has another form.
    """
    name, _, rest = text.partition("=")
    size, _, over = rest.partition(":")
    if not size.isdecimal() or not over:
        raise TopologyError(f"{text!r} is not a laid group: write it as ep=4:dp_shard+tp (name, size, axes)")
    return Laid(name, int(size), tuple(over.split("+")))


def parse_mesh(text: str) -> dict[str, int]:
    """Read a mesh, e.g. ``pp=2,dp_shard=-1,tp=2``.

    Raises:
        TopologyError: the text has another form.
    """
    parts = [part.partition("=") for part in text.split(",")]
    if any(not size.removeprefix("-").isdecimal() for _, _, size in parts):
        raise TopologyError(f"{text!r} is not a mesh: write it as pp=2,dp_shard=-1,tp=2")
    if len({name for name, _, _ in parts}) < len(parts):
        raise TopologyError(f"{text!r} names an axis twice")
    return {name: int(size) for name, _, size in parts}
