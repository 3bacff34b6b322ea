"""Places backups: each rank's backup is on a machine that shares none of the rank's parallel groups.

ByteRobust may evict a complete parallel group, and survives that since each rank's backup is outside all of its groups
(section 7, figure 9). Here the loss of a group means the loss of *all machines that run any rank of it*. So owner and
peer are compared by machine: two machines conflict if some group has ranks on both. All ranks of a machine have their
peers on the same machine. That excludes no solution: if the backups of single ranks can be placed without a conflict
and with an equal load, the backups of whole machines can be placed so too.

The search tries steps along two or more axes of the machines' mesh first, then exchanges and shifts of machines, and
last a bipartite matching, which always finds a placement if one exists.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations, permutations
from math import gcd
from operator import eq

from everstep.errors import TopologyError
from everstep.model.topology import Topology

DOMAIN = "failure domain"
"""The kind of group that is no axis of the mesh: machines that fail together."""
Spans = Mapping[str, Mapping[tuple[int, ...], int]]
"""Kind of group → the machines of a group (two or more) → the number of groups on exactly these machines."""
Hit = Mapping[str, Mapping[tuple[int, ...], int]]
"""The part of ``Spans`` with the groups whose loss takes an owner together with its peer."""
Move = Callable[[int], int]
"""Machine → the machine with its backups."""
FEW = 6
"""With at most this many machines, every permutation is tried if no placement without a conflict exists."""
MOST_TOLERATED = 4
"""Combinations of up to this many kinds of groups are tried as kinds that may conflict; then all kinds at once."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of backups, and the losses that it does not survive."""

    peers: tuple[int | None, ...]
    """Rank → its peer, the rank whose machine has its backup; None: there is no other machine."""
    involution: bool
    """The ranks back each other up in pairs."""
    shared: tuple[str, ...]
    """Kinds of groups in which the loss of one group takes an owner together with its peer."""
    reason: str
    """The possible loss, and why it cannot be smaller, as text for people."""
    domains: tuple[str, ...] = ()
    """Failure domains whose loss takes an owner together with its peer."""


def place_backups(topology: Topology, domains: Sequence[str] = ()) -> Placement:
    """Choose a peer on another machine for every rank, outside its parallel groups if that is possible.

    Every machine has as many backups as ranks. If conflicts cannot be avoided, the number of parallel groups with a
    conflict is the smallest possible, and then the number of failure domains.

    Args:
        topology: Ranks and machines.
        domains: The failure domain of each machine, e.g. its switch or rack; ``""``: not known.

    Raises:
        TopologyError: ``domains`` does not have an entry for each machine.
    """
    if domains and len(domains) != topology.machines:
        raise TopologyError(f"{len(domains)} failure domains are named for {topology.machines} machines: name each")
    if topology.machines == 1:
        alone = "there is one machine only: losing it costs the steps since the last disk checkpoint"
        return Placement((None,) * topology.world_size, involution=False, shared=(), reason=alone)
    spans = _spans(topology, domains)
    target = _best(topology, spans)
    hit: Hit = {kind: _hit(groups, target) for kind, groups in spans.items()}
    lost = tuple(sorted({domains[group[0]] for group in hit.get(DOMAIN, ())}))
    size = topology.ranks_per_machine
    return Placement(
        peers=tuple(target[rank // size] * size + rank % size for rank in range(topology.world_size)),
        involution=all(target[target[machine]] == machine for machine in range(topology.machines)),
        shared=tuple(kind for kind in topology.kinds if hit.get(kind)),
        reason=_reason(topology, spans, hit, lost, target),
        domains=lost,
    )


def survives(topology: Topology, placement: Placement, lost_machines: AbstractSet[int]) -> bool:
    """Return whether every rank's state, or its backup, is on a machine that is left."""
    size = topology.ranks_per_machine
    return all(
        rank // size not in lost_machines or (peer is not None and peer // size not in lost_machines)
        for rank, peer in enumerate(placement.peers)
    )


def _spans(topology: Topology, domains: Sequence[str]) -> Spans:
    size = topology.ranks_per_machine
    spans: dict[str, Counter[tuple[int, ...]]] = {}
    for kind in topology.kinds:
        members = (sorted({rank // size for rank in group}) for group in topology.groups(kind))
        spans[kind] = Counter(tuple(machines) for machines in members if len(machines) > 1)
    together = [
        tuple(machine for machine, domain in enumerate(domains) if domain == name) for name in sorted({*domains} - {""})
    ]
    spans[DOMAIN] = Counter(machines for machines in together if len(machines) > 1)
    return {kind: groups for kind, groups in spans.items() if groups}


def _best(topology: Topology, spans: Spans) -> list[int]:
    """Return machine → the machine with its backups, for the best placement."""
    machines = topology.machines
    moves = [*_steps_in_mesh(topology), *_exchanges(machines), *_shifts(machines)]
    strict: list[int | None] = [None] * machines
    found: list[tuple[tuple[int, int, int], list[int]]] = []
    for tolerated in _subsets(spans):
        allowed = _allowed(machines, [groups for kind, groups in spans.items() if kind not in tolerated])
        regular = next((move for move in moves if all(allowed[m] >> move(m) & 1 for m in range(machines))), None)
        if regular:
            found.append(_costed(spans, [regular(machine) for machine in range(machines)]))
        if not (regular and not tolerated):
            matched = _matching(allowed, strict)
            # Later searches, which tolerate more, extend the matching without a conflict.
            strict = strict if tolerated else matched
            complete = [machine for machine in matched if machine is not None]
            found += [_costed(spans, complete)] if len(complete) == machines else []
        if found and tolerated <= {DOMAIN} and not found[-1][0][0]:
            break  # no parallel group is hit
    else:
        if machines <= FEW:
            every = permutations(range(machines))
            found += [_costed(spans, [*to]) for to in every if not any(map(eq, to, range(machines)))]
    return min(found, key=lambda costed: costed[0])[1]


def _subsets(spans: Spans) -> Iterator[frozenset[str]]:
    """Return the sets of kinds that may conflict, from none to all; failure domains come before parallel groups."""
    kinds = sorted(spans, key=lambda kind: (kind != DOMAIN, kind))
    for size in range(len(kinds) + 1):
        if size <= MOST_TOLERATED or size == len(kinds):
            yield from map(frozenset, combinations(kinds, size))


def _costed(spans: Spans, target: list[int]) -> tuple[tuple[int, int, int], list[int]]:
    """Return the cost of a placement, and the placement.

    The cost is the number of parallel groups, of failure domains, and of machines with a conflict.
    """
    counts = {kind: sum(_hit(groups, target).values()) for kind, groups in spans.items()}
    domains = counts.pop(DOMAIN, 0)
    owners = sum(target[machine] in group for group in spans.get(DOMAIN, ()) for machine in group)
    return (sum(counts.values()), domains, owners), target


def _hit(groups: Mapping[tuple[int, ...], int], target: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Return the groups of a kind whose loss takes an owner together with its peer."""
    return {group: count for group, count in groups.items() if not {target[m] for m in group}.isdisjoint(group)}


def _allowed(machines: int, avoid: Iterable[Iterable[tuple[int, ...]]]) -> list[int]:
    """Return for each machine the other machines without a conflict, as bits."""
    near = [1 << machine for machine in range(machines)]
    for groups in avoid:
        for group in groups:
            mask = 0
            for machine in group:
                mask |= 1 << machine
            for machine in group:
                near[machine] |= mask
    everything = (1 << machines) - 1
    return [everything & ~mask for mask in near]


def _steps_in_mesh(topology: Topology) -> Iterator[Move]:
    """Return the steps along two or more axes of the machines' mesh. They avoid all groups if machines tile the mesh.

    Figure 9 of ByteRobust shows the step along pp and dp.
    """
    rest, sizes = topology.ranks_per_machine, {}
    for axis, size in reversed(topology.mesh):
        inside = gcd(size, rest)
        if inside < size and inside != rest:
            return  # a machine holds parts of several rows of the mesh
        sizes[axis], rest = size // inside, rest // inside
    # Axes whose ranks are far apart come first, since machines that are near each other are often lost together.
    across = sorted(topology.axes, key=lambda axis: (axis != "pp", axis not in topology.data_axes, axis == "tp"))
    wide = [axis for axis in across if sizes[axis] > 1]
    for count in range(2, len(wide) + 1):
        for moved in combinations(wide, count):
            yield _step([(axis, sizes[axis]) for axis in reversed(topology.axes)], moved)


def _step(sizes: Sequence[tuple[str, int]], moved: Sequence[str]) -> Move:
    """Return the step along some axes.

    Along axes of even size, neighbours exchange places. Along axes of odd size, machines move by one place. Their
    position on the first even axis decides whether they move up or down.
    """

    def move(machine: int) -> int:
        position, rest = {}, machine
        for axis, size in sizes:
            rest, position[axis] = divmod(rest, size)
        even = [axis for axis, size in sizes if axis in moved and size % 2 == 0]
        direction = -1 if even and position[even[0]] % 2 else 1
        to = 0
        for axis, size in reversed(sizes):
            at = position[axis]
            if axis in moved:
                at = at ^ 1 if size % 2 == 0 else (at + direction) % size
            to = to * size + at
        return to

    return move


def _exchanges(machines: int) -> Iterator[Move]:
    """Return the moves that exchange neighbouring blocks of machines."""
    for block in range(1, machines // 2 + 1):
        if machines % (2 * block) == 0:
            yield lambda machine, block=block: (machine // block ^ 1) * block + machine % block  # type: ignore[misc]


def _shifts(machines: int) -> Iterator[Move]:
    """Return the moves by a fixed number of machines."""
    for by in range(1, machines):
        yield lambda machine, by=by: (machine + by) % machines  # type: ignore[misc]


def _matching(allowed: Sequence[int], start: Sequence[int | None]) -> list[int | None]:
    """Return a largest matching of machines to allowed machines, grown from ``start`` by shortest augmenting paths."""
    target = list(start)
    owner = {to: machine for machine, to in enumerate(target) if to is not None}
    all_bits = (1 << len(allowed)) - 1
    candidates, used = all_bits, 0
    for to in owner:
        used |= 1 << to
    for root in range(len(allowed)):
        if target[root] is None:
            # Machines that a failed search has visited are dead ends for later searches too.
            visited, added = _augment(root, allowed, (candidates, all_bits & ~used), target, owner)
            candidates, used = candidates & ~visited, used | added
    return target


def _augment(
    root: int, allowed: Sequence[int], search: tuple[int, int], target: list[int | None], owner: dict[int, int]
) -> tuple[int, int]:
    """Match one more machine along an augmenting path, if there is one.

    Args:
        root: The machine to match.
        allowed: Machine → the machines that it may be matched to, as bits.
        search: The machines that the search may visit, and the machines among them that are not matched, as bits.
        target: Machine → its match; changed in place.
        owner: Matched machine → the machine that it is matched to; changed in place.

    Returns:
        The machines that a failed search visited, and the machine that is newly matched, as bits; one of them is 0.
    """
    reached_from: dict[int, int] = {}
    unseen, free = search
    before_search = unseen
    waiting = deque([root])
    while waiting:
        machine = waiting.popleft()
        reach = allowed[machine] & unseen
        unseen &= ~reach
        if free_now := reach & free:
            to = (free_now & -free_now).bit_length() - 1
            reached_from[to] = machine
            _give_way(to, reached_from, target, owner)
            return 0, free_now & -free_now
        while reach:
            to = (reach & -reach).bit_length() - 1
            reach &= reach - 1
            reached_from[to] = machine
            waiting.append(owner[to])
    return before_search & ~unseen, 0


def _give_way(to: int | None, reached_from: Mapping[int, int], target: list[int | None], owner: dict[int, int]) -> None:
    """Apply the path that ends at a free machine.

    Each machine on the path gets the next match, and gives its own match to the machine before it.
    """
    while to is not None:
        at = reached_from[to]
        before, target[at], owner[to] = target[at], to, at
        to = before


COSTS = "costs the steps since the last disk checkpoint"


def _reason(topology: Topology, spans: Spans, hit: Hit, lost: Sequence[str], target: Sequence[int]) -> str:
    all_machines = tuple(range(topology.machines))
    shared = [kind for kind in topology.kinds if hit.get(kind)]
    common = next((kind for kind in shared if all_machines in spans[kind]), None)
    if common:
        near = all(abs(to - machine) in {1, topology.machines - 1} for machine, to in enumerate(target))
        peer = "the neighbouring machine" if near else "another machine"
        text = f"all {topology.machines} machines are in one {common} group: backups go to {peer}; losing both {COSTS}"
    elif shared:
        counts = [(sum(hit[kind].values()), topology.world_size // topology.size(kind), kind) for kind in shared]
        groups = [f"{'any' if count == total else count} of the {total} {kind} groups" for count, total, kind in counts]
        text = f"losing all machines of {' or '.join(groups)} takes owner and peer together and {COSTS}"
    else:
        text = "every backup is outside its rank's parallel groups: the machines of any one group may be lost"
    if lost:
        return f"{text}; losing failure domain {' or '.join(lost[:4])} takes owner and peer together and {COSTS}"
    return f"{text}, and so may any one failure domain" if DOMAIN in spans and not shared else text
