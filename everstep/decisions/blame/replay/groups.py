"""Groups of machines for dual-phase replay (ByteRobust, section 6, algorithm 1).

The job's script is run again on groups of machines: once by rows, ``x // m``, once by columns, ``x mod n``. Machine x
is in one group of each phase, so a machine at fault shows in both, and the two groups have few machines in common.
TP and PP sizes stay, and with them every other size that splits the model; the data axes shrink, so a group has whole
replicas of it. All groups of a phase run at once.

Everstep adds: if the machines do not divide into groups of one size, the last groups are filled with machines that run
in another group as well, and such groups run after the others (a further *wave*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, isqrt, lcm, prod

from everstep.errors import TopologyError
from everstep.model.topology import Topology


@dataclass(frozen=True, slots=True)
class ReplayGroup:
    """Machines that run the script together."""

    name: str
    """``row 3`` or ``column 1``."""
    machines: tuple[int, ...]
    """Positions, in ascending order."""
    filled: tuple[int, ...] = ()
    """Machines of the group that also run in another group of this phase."""


@dataclass(frozen=True, slots=True)
class ReplayPhase:
    """One of the two phases."""

    name: str
    waves: tuple[tuple[ReplayGroup, ...], ...]
    """Groups of one wave have no machine in common: they run at once."""

    @property
    def groups(self) -> tuple[ReplayGroup, ...]:
        """All groups of the phase."""
        return tuple(group for wave in self.waves for group in wave)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The groups of both phases."""

    machines: int
    size: int
    """Machines of a group: m of the paper."""
    count: int
    """Groups of a phase: n of the paper."""
    phases: tuple[ReplayPhase, ReplayPhase]

    @property
    def unique(self) -> bool:
        """Whether a single machine at fault is always named alone (m ≤ n)."""
        return self.size <= self.count

    @property
    def most_suspects(self) -> int:
        """The largest number of machines that are named for a single machine at fault: ⌈m / n⌉."""
        return -(-self.size // self.count)

    @property
    def groups(self) -> tuple[ReplayGroup, ...]:
        """The groups of both phases."""
        return tuple(group for phase in self.phases for group in phase.groups)

    @property
    def of_machines(self) -> dict[int, frozenset[str]]:
        """Machine → the names of its groups."""
        found: dict[int, set[str]] = {x: set() for x in range(self.machines)}
        for group in self.groups:
            for x in group.machines:
                found[x].add(group.name)
        return {x: frozenset(names) for x, names in found.items()}


def replica_machines(topology: Topology) -> int:
    """Return the fewest machines that hold whole replicas of the model: k = 1 of the paper.

    If a machine holds one TP group, the result is the PP size. A machine may hold several TP groups, or several
    replicas, or a replica may end within a machine. Groups that are laid over data axes, e.g. of experts, stay whole.
    """
    data = prod(topology.size(axis) for axis in topology.data_axes)
    whole = 1
    for kind in topology.laid:
        split = prod(topology.size(axis) for axis in kind.over if axis not in topology.data_axes)
        whole = lcm(whole, kind.size // gcd(kind.size, split))
    ranks = topology.world_size // data * whole
    return ranks // gcd(ranks, topology.ranks_per_machine)


def group_size(machines: int, unit: int) -> int:
    """Return the number of machines of a group: whole replicas, as near to the job's size as a unique answer allows.

    Args:
        machines: The number of machines to be tested.
        unit: Machines of a group come in multiples of this (:func:`replica_machines`).

    Returns:
        The largest multiple of ``unit`` that divides the machines and is not more than the number of groups; if there
        is none, the unit itself: then groups are filled, or several machines may be named for a single fault.

    Raises:
        TopologyError: there are fewer machines than a replica needs.
    """
    if machines < unit:
        raise TopologyError(f"{machines} machines hold no replica of the model, which needs {unit}")
    sizes = [size for size in range(unit, isqrt(machines) + 1, unit) if machines % size == 0]
    return max(sizes, default=unit)


def plan_replay(machines: int, size: int) -> ReplayPlan:
    """Plan the groups of both phases.

    Args:
        machines: The number of machines to be tested; positions are counted from 0.
        size: Machines of a group.

    Raises:
        TopologyError: there are fewer machines than a group has.
    """
    if not 0 < size <= machines:
        raise TopologyError(f"a group of {size} machines cannot be made of {machines}")
    count = -(-machines // size)
    rows = [[x for x in range(size * count) if x // size == row] for row in range(count)]
    columns = [[x for x in range(size * count) if x % count == column] for column in range(count)]
    phases = (_phase("row", rows, machines), _phase("column", columns, machines))
    return ReplayPlan(machines, size, count, phases)


def _phase(name: str, groups: Sequence[Sequence[int]], machines: int) -> ReplayPhase:
    """Fill positions that have no machine, and put groups that share a machine into different waves."""
    waves: list[list[ReplayGroup]] = []
    lent: dict[int, int] = {}
    for number, places in enumerate(groups):
        own = [x for x in places if x < machines]
        others = (x for x in range(machines) if x not in own)
        # Machines that were lent least are first: no machine has to run much more often than the other machines.
        filling = sorted(others, key=lambda x: (lent.get(x, 0), x))[: len(places) - len(own)]
        for x in filling:
            lent[x] = lent.get(x, 0) + 1
        group = ReplayGroup(f"{name} {number}", tuple(sorted(own + filling)), tuple(sorted(filling)))
        for wave in waves:
            if all(set(other.machines).isdisjoint(group.machines) for other in wave):
                wave.append(group)
                break
        else:
            waves.append([group])
    return ReplayPhase(f"{name}s", tuple(map(tuple, waves)))
