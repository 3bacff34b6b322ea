"""Forms the groups of machines for a dual-phase replay (ByteRobust, section 6, algorithm 1).

The job's script runs again on groups of machines. Machine x is in row ``x // m`` in the first phase, and in column
``x mod n`` in the second phase. So a machine at fault shows in both phases, and its two groups have few machines in
common. All groups of a phase run at once.

The sizes that split the model, e.g. TP and PP, stay the same. The data parallel sizes shrink, so that a group has
complete replicas of the model.

If the machines do not divide into groups of one size, the last groups are filled with machines of other groups. The
filled groups run after the other groups, in a further *wave*. (This rule is everstep's own.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import gcd, isqrt, lcm, prod

from everstep.errors import TopologyError
from everstep.model.topology import Topology


@dataclass(frozen=True, slots=True)
class ReplayGroup:
    """Machines that run the script together."""

    name: str
    """``row 3`` or ``column 1``."""
    machines: tuple[int, ...]
    """The positions of the machines, ascending."""
    filled: tuple[int, ...] = ()
    """The machines of the group that also run in another group of this phase."""


@dataclass(frozen=True, slots=True)
class ReplayPhase:
    """One of the two phases."""

    name: str
    waves: tuple[tuple[ReplayGroup, ...], ...]
    """The groups of one wave have no machine in common, so they run at once."""

    @property
    def groups(self) -> tuple[ReplayGroup, ...]:
        """All groups of the phase."""
        return tuple(group for wave in self.waves for group in wave)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The groups of both phases."""

    machines: int
    size: int
    """The number of machines of a group, ``m`` in the paper. If m ≤ n, a single machine at fault is named alone."""
    count: int
    """The number of groups of a phase, ``n`` in the paper."""
    phases: tuple[ReplayPhase, ReplayPhase]

    @property
    def groups(self) -> tuple[ReplayGroup, ...]:
        """The groups of both phases."""
        return tuple(group for phase in self.phases for group in phase.groups)

    @property
    def groups_of_machines(self) -> dict[int, frozenset[str]]:
        """Position of a machine → the names of its groups."""
        groups_of: dict[int, set[str]] = {x: set() for x in range(self.machines)}
        for group in self.groups:
            for x in group.machines:
                groups_of[x].add(group.name)
        return {x: frozenset(names) for x, names in groups_of.items()}


def replica_machines(topology: Topology) -> int:
    """Return the least number of machines on which complete replicas of the model run (k = 1 in the paper).

    If one TP group runs on a machine, this is the PP size. But several TP groups or several replicas may run on one
    machine, and a replica may end within a machine. Laid groups along data axes, e.g. of experts, are not divided.
    """
    data = prod(topology.size(axis) for axis in topology.data_axes)
    replicas = 1
    for kind in topology.laid:
        split = prod(topology.size(axis) for axis in kind.over if axis not in topology.data_axes)
        replicas = lcm(replicas, kind.size // gcd(kind.size, split))
    ranks = topology.world_size // data * replicas
    return ranks // gcd(ranks, topology.ranks_per_machine)


def group_size(machines: int, unit: int) -> int:
    """Return the number of machines of a group: the largest number with which a single fault names only one machine.

    Args:
        machines: The number of machines to be tested.
        unit: The size of a group is a multiple of this (:func:`replica_machines`).

    Returns:
        The largest multiple of ``unit`` that divides the machines and is not more than the number of groups. If there
        is none, ``unit`` itself: then groups are filled, or a single fault may name several machines.

    Raises:
        TopologyError: there are fewer machines than a replica needs.
    """
    if machines < unit:
        raise TopologyError(f"{machines} machines are too few: a replica of the model needs {unit}")
    sizes = [size for size in range(unit, isqrt(machines) + 1, unit) if machines % size == 0]
    return max(sizes, default=unit)


def plan_replay(machines: int, size: int) -> ReplayPlan:
    """Plan the groups of both phases.

    Args:
        machines: The number of machines to be tested; positions are counted from 0.
        size: The number of machines of a group.

    Raises:
        TopologyError: there are fewer machines than a group has.
    """
    if not 0 < size <= machines:
        raise TopologyError(f"a group of {size} machines is not possible with {machines} machines")
    count = -(-machines // size)
    rows = [range(row * size, (row + 1) * size) for row in range(count)]
    columns = [range(column, size * count, count) for column in range(count)]
    phases = (_phase("row", rows, machines), _phase("column", columns, machines))
    return ReplayPlan(machines, size, count, phases)


def _phase(name: str, groups: Sequence[Sequence[int]], machines: int) -> ReplayPhase:
    """Fill positions that have no machine, and put groups that share a machine into different waves."""
    waves: list[tuple[list[ReplayGroup], set[int]]] = []
    # The machines that have been lent least often are lent first, so no machine runs much more often than others.
    lent = [(0, x) for x in range(machines)]
    for number, positions in enumerate(groups):
        own = {x for x in positions if x < machines}
        filling: list[int] = []
        passed: list[tuple[int, int]] = []
        while len(own) + len(filling) < len(positions):
            times, x = heappop(lent)
            passed.append((times + (x not in own), x))
            if x not in own:
                filling.append(x)
        for each in passed:
            heappush(lent, each)
        group = ReplayGroup(f"{name} {number}", tuple(sorted([*own, *filling])), tuple(sorted(filling)))
        for wave, busy in waves:
            if busy.isdisjoint(group.machines):
                wave.append(group)
                busy.update(group.machines)
                break
        else:
            waves.append(([group], set(group.machines)))
    return ReplayPhase(f"{name}s", tuple(tuple(wave) for wave, _ in waves))
