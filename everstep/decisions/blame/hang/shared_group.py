"""The smallest parallel group that outliers share (section 5.1, figure 7).

The paper evicts the machines of the parallel group that the outliers share. The paper leaves these rules open, and they
are everstep's:

- A group counts with the machines of its ranks, for machines are what is evicted.
- Outliers of one machine: that machine is evicted, and no innocent machine.
- Else the group of one kind (an axis of the mesh, or laid over some) whose machines hold all outliers and are the
  fewest. Two with as few: the one with fewer ranks, then the one whose kind varies faster in the mesh; the other is an
  alternative.
- No such group: a group all of whose machines hold outliers, and that holds three quarters of those machines. The
  other outliers are unexplained, and stay.
- Still none: ranks that are alike along all axes but some, e.g. a whole replica of the model.
- More than half of the job's machines is no answer: then there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from everstep.decisions.blame.hang.verdict import ParallelGroup
from everstep.model.topology import Topology

MOST_OF_JOB = 0.5
"""Largest share of a job's machines that a group may have."""
LEAST_EXPLAINED = 0.75
"""Least share of the machines with outliers that a group must have, where it does not have all."""


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """The group that outliers share."""

    group: ParallelGroup
    alternatives: tuple[ParallelGroup, ...] = ()
    unexplained: tuple[int, ...] = ()
    """Outliers outside of it."""


def shared_group(
    outliers: Sequence[int], topology: Topology, *, most_of_job: float = MOST_OF_JOB
) -> SharedGroup | None:
    """The smallest group that outliers share; None: there are no outliers, or they share none that is small enough."""
    machines = frozenset(map(topology.machine, outliers))
    most = max(1, int(most_of_job * topology.machines))
    if not machines:
        return None
    if len(machines) == 1:
        (one,) = machines
        return SharedGroup(ParallelGroup("machine", topology.ranks(one), (one,)))
    first = topology.ranks(min(machines))
    of_one_kind = _distinct(_groups(first, topology), topology)
    if best := [group for group in of_one_kind if machines <= set(group.machines) and len(group.machines) <= most]:
        return SharedGroup(best[0], _as_small(best))
    everywhere = [rank for machine in sorted(machines) for rank in topology.ranks(machine)]
    whole = [
        group
        for group in _distinct(_groups(everywhere, topology), topology)
        if 1 < len(group.machines) <= most
        and machines >= set(group.machines)
        and len(group.machines) >= LEAST_EXPLAINED * len(machines)
    ]
    if whole:
        whole.sort(key=lambda group: -len(group.machines))  # stable: the order of before among equals
        inside = set(whole[0].machines)
        return SharedGroup(
            whole[0],
            _as_small(whole),
            tuple(sorted(rank for rank in set(outliers) if topology.machine(rank) not in inside)),
        )
    together = _distinct(_composites(first, topology), topology)
    if best := [group for group in together if machines <= set(group.machines) and len(group.machines) <= most]:
        return SharedGroup(best[0], _as_small(best))
    return None


def _as_small(found: Sequence[ParallelGroup]) -> tuple[ParallelGroup, ...]:
    """Those with as few machines as the first one, but for those with the same."""
    first = found[0]
    alike = [one for one in found[1:] if len(one.machines) == len(first.machines) and one.machines != first.machines]
    return tuple({group.machines: group for group in reversed(alike)}.values())[::-1]


def _groups(ranks: Sequence[int], topology: Topology) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The groups of each kind that some ranks are in, the kind that varies fastest first."""
    kinds = [*reversed(topology.axes), *(kind.name for kind in topology.laid)]
    for kind in kinds:
        if topology.size(kind) > 1:
            for rank in ranks:
                yield kind, topology.group(rank, kind)


def _composites(ranks: Sequence[int], topology: Topology) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Ranks that differ along some axes only, of the ranks of one machine; not along all axes: that is the job."""
    axes = [axis for axis in topology.axes if topology.size(axis) > 1]
    for count in range(2, len(axes)):
        for some in combinations(axes, count):
            for rank in ranks:
                yield "+".join(some), topology.along(rank, some)


def _distinct(groups: Iterator[tuple[str, tuple[int, ...]]], topology: Topology) -> list[ParallelGroup]:
    """With their machines, the smallest first: by machines, then ranks, then in the order in which they came."""
    per_machine = topology.ranks_per_machine
    found = {
        ranks: ParallelGroup(kind, ranks, tuple(sorted({rank // per_machine for rank in ranks})))
        for kind, ranks in groups
    }
    return sorted(found.values(), key=lambda group: (len(group.machines), len(group.ranks)))
