"""The smallest parallel group that outliers share.

ByteRobust evicts the machines of the parallel group that the outliers share (section 5.1, figure 7). It does not define
this group; everstep's rules are, in this order:

1. If all outliers are on one machine, it is that machine.
2. Otherwise it is a group along one axis of the mesh, or a laid group, whose machines run all outliers. The group with
   the fewest machines counts; of equal groups the one with fewer ranks, then the one whose kind varies faster in the
   mesh. The other groups with as few machines are alternatives.
3. Otherwise it is a group with an outlier on each of its machines, if it has at least three quarters of all machines
   with outliers. The other outliers are unexplained, and their machines stay.
4. Otherwise it is a group along several axes, but not all, whose machines run all outliers. For example, a complete
   replica of the model is such a group.

A group with more than half of the job's machines never counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from everstep.decisions.blame.hang.verdict import ParallelGroup
from everstep.model.topology import Topology

MOST_OF_JOB = 0.5
"""The largest share of a job's machines that a group may have."""
LEAST_EXPLAINED = 0.75
"""A group must have at least this share of the machines with outliers."""


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """The group that outliers share."""

    group: ParallelGroup
    alternatives: tuple[ParallelGroup, ...] = ()
    unexplained: tuple[int, ...] = ()
    """The outliers outside of the group."""


def shared_group(
    outliers: Sequence[int], topology: Topology, *, most_of_job: float = MOST_OF_JOB
) -> SharedGroup | None:
    """Return the smallest group that outliers share; None if there are no outliers, or no group is small enough."""
    machines = frozenset(map(topology.machine, outliers))
    most = max(1, int(most_of_job * topology.machines))
    if not machines:
        return None
    if len(machines) == 1:
        (machine,) = machines
        return SharedGroup(ParallelGroup("machine", topology.ranks(machine), (machine,)))
    first = topology.ranks(min(machines))
    of_one_kind = _distinct(_groups(first, topology), topology)
    if best := [group for group in of_one_kind if machines <= set(group.machines) and len(group.machines) <= most]:
        return SharedGroup(best[0], _as_small(best))
    everywhere = [rank for machine in sorted(machines) for rank in topology.ranks(machine)]
    full = [
        group
        for group in _distinct(_groups(everywhere, topology), topology)
        if 1 < len(group.machines) <= most
        and machines >= set(group.machines)
        and len(group.machines) >= LEAST_EXPLAINED * len(machines)
    ]
    if full:
        full.sort(key=lambda group: -len(group.machines))  # a stable sort: equal groups keep their order
        inside = set(full[0].machines)
        return SharedGroup(
            full[0],
            _as_small(full),
            tuple(sorted(rank for rank in set(outliers) if topology.machine(rank) not in inside)),
        )
    of_several_axes = _distinct(_composites(first, topology), topology)
    if best := [group for group in of_several_axes if machines <= set(group.machines) and len(group.machines) <= most]:
        return SharedGroup(best[0], _as_small(best))
    return None


def _as_small(groups: Sequence[ParallelGroup]) -> tuple[ParallelGroup, ...]:
    """Return the groups with as many machines as the first group has, but other machines."""
    first = groups[0].machines
    alike = [group for group in groups[1:] if len(group.machines) == len(first) and group.machines != first]
    return tuple({group.machines: group for group in reversed(alike)}.values())[::-1]


def _groups(ranks: Sequence[int], topology: Topology) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield kind and ranks of the groups that ranks are in, the kind that varies fastest first."""
    kinds = [*reversed(topology.axes), *(kind.name for kind in topology.laid)]
    for kind in kinds:
        if topology.size(kind) > 1:
            for rank in ranks:
                yield kind, topology.group(rank, kind)


def _composites(ranks: Sequence[int], topology: Topology) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and ranks of the groups along two or more axes; not along all axes, which would be the job."""
    axes = [axis for axis in topology.axes if topology.size(axis) > 1]
    for count in range(2, len(axes)):
        for chosen in combinations(axes, count):
            for rank in ranks:
                yield "+".join(chosen), topology.along(rank, chosen)


def _distinct(groups: Iterator[tuple[str, tuple[int, ...]]], topology: Topology) -> list[ParallelGroup]:
    """Return each group once, sorted by the number of its machines, then of its ranks."""
    per_machine = topology.ranks_per_machine
    distinct = {
        ranks: ParallelGroup(kind, ranks, tuple(sorted({rank // per_machine for rank in ranks})))
        for kind, ranks in groups
    }
    return sorted(distinct.values(), key=lambda group: (len(group.machines), len(group.ranks)))
