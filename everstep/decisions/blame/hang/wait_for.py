"""The graph of ranks that wait for each other.

A rank inside a collective waits for the members of its group that have not entered it. A rank inside a point-to-point
operation waits for its neighbour. A rank that does work of its own waits for no rank. If waiting is followed from any
rank, it ends in a *sink*: ranks that wait for no rank outside of the sink. ByteRobust has no such graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from everstep.decisions.blame.hang.rank_samples import WORLD, JobSamples, PendingOperation, RankSample
from everstep.decisions.blame.hang.stacks import LeafKind
from everstep.model.topology import Topology

FIRST = 1
"""The number of the first collective of a group."""
CLEAR_MAJORITY = 3
"""A few ranks count as different from the rest only if the rest has at least this many times as many ranks."""
TRANSFER = "send and recv"
"""The operation of two ranks of which one sends to the other, which receives."""


@dataclass(frozen=True, slots=True)
class OpenCollective:
    """A collective that some ranks of its group entered and have not finished, or a transfer between two ranks."""

    group: str
    number: int
    operation: str
    """The operation that most ranks inside the collective call."""
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    """Members that have not entered it."""
    passed: tuple[int, ...]
    """Members that have finished the collective: it will finish, or the records are of different moments."""
    is_certain: bool
    """Whether all members are known: a group that was never used before may have more members than those inside."""
    operations: Mapping[str, tuple[int, ...]]
    """Operation, with sizes if all ranks must have the same → ranks that call it. With two operations, the ranks do not
    match."""

    @property
    def is_stuck(self) -> bool:
        """Whether all members are inside the collective, and none has finished it."""
        return self.is_certain and len(self.entered) > 1 and not self.missing and not self.passed

    @property
    def lagging(self) -> tuple[int, ...]:
        """The few members inside the collective, if all other members have finished it: their device does not work, or
        the records are of different moments."""
        few = not self.missing and len(self.entered) * CLEAR_MAJORITY <= len(self.passed)
        return self.entered if self.is_certain and few else ()


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The graph of ranks and the ranks that they wait for."""

    edges: Mapping[int, frozenset[int]]
    """Node → nodes for which it waits. A node from 0 on is a rank; -1 is the first of ``collectives``, -2 the second. A
    collective waits for its missing members: thus 1,000 ranks that wait for 1,000 others need only 2,000 edges."""
    by_frames: frozenset[int]
    """Ranks that wait for a neighbour according to the names of their functions, without a record of it."""
    uncertain: frozenset[int]
    """Ranks that wait for one of two neighbours, and the names of their functions do not show which."""
    blind: frozenset[int]
    """Ranks that wait for unknown ranks."""
    collectives: tuple[OpenCollective, ...]
    """The collectives in which ranks wait, the one with most ranks inside first."""


@dataclass(frozen=True, slots=True)
class Sink:
    """The end of a chain of waiting ranks."""

    ranks: tuple[int, ...]
    """One rank, several ranks that wait for each other, or all members of a collective that does not finish."""
    behind: frozenset[int] = frozenset()
    """Other ranks that wait for these ranks, directly or through further ranks."""
    stuck: OpenCollective | None = None
    """The collective that all ``ranks`` are inside, if it does not finish."""


def wait_graph(samples: JobSamples, topology: Topology) -> WaitGraph:
    """Return the graph of all known ranks that wait."""
    transfers = _transfers(samples)
    collectives = (*open_collectives(samples, topology), *transfers.values())
    inside: dict[int, list[int]] = defaultdict(list)
    edges: dict[int, frozenset[int]] = {}
    for number, collective in enumerate(collectives):
        for rank in collective.entered:
            inside[rank].append(number)
        if collective.missing:
            edges[-1 - number] = frozenset(collective.missing)
    stacks_show = all(_waits_in_python(samples.of(rank)) for rank in inside)
    by_frames, uncertain, blind = set(), set(), set()
    for rank, sample in samples.ranks.items():
        if sample.is_stopped or not sample.is_known:
            continue
        leaf = sample.trainer.leaf if sample.trainer else None
        record = sample.record
        peers = {pending.peer for pending in (record.pending if record else ()) if pending.peer is not None}
        targets = {-1 - number for number in inside[rank] if collectives[number].missing}
        targets |= {peer for peer in peers if _pair(rank, peer) not in transfers}
        if leaf and leaf.kind is LeafKind.P2P and not peers:
            neighbours = _neighbours(rank, leaf.toward, topology)
            targets |= neighbours
            by_frames.add(rank)
            if len(neighbours) > 1:
                uncertain.add(rank)
        if targets:
            edges[rank] = frozenset(targets)
        elif ((leaf and (leaf.waits or not (stacks_show or _is_reported(sample)))) or inside[rank]) and not any(
            collectives[number].is_stuck or rank in collectives[number].lagging for number in inside[rank]
        ):
            blind.add(rank)
    return WaitGraph(edges, frozenset(by_frames), frozenset(uncertain), frozenset(blind), collectives)


def open_collectives(samples: JobSamples, topology: Topology) -> tuple[OpenCollective, ...]:
    """Return the collectives that some rank has not finished: of each rank and group the oldest."""
    by_number: dict[tuple[str, int], dict[int, PendingOperation]] = defaultdict(dict)
    for rank, sample in samples.ranks.items():
        for pending in sample.record.pending if sample.record else ():
            if not pending.is_p2p:
                by_number[pending.group, pending.number][rank] = pending
    members = {group: members_of(group, samples, topology) for group in {group for group, _ in by_number}}
    collectives = []
    for (group, number), entered in by_number.items():
        calls: dict[str, list[int]] = defaultdict(list)
        for rank, pending in entered.items():
            calls[f"{pending.operation} {pending.sizes}".strip()].append(rank)
        common = max(calls.values(), key=len)
        collectives.append(
            OpenCollective(
                group,
                number,
                entered[common[0]].operation,
                tuple(sorted(entered)),
                tuple(rank for rank in members[group] if _entered(rank, group, samples) < number),
                tuple(
                    rank for rank in members[group] if rank not in entered and _entered(rank, group, samples) >= number
                ),
                bool(samples.groups.get(group)) or number > FIRST or len(members[group]) > len(entered),
                {call: tuple(sorted(ranks)) for call, ranks in calls.items()},
            )
        )
    collectives.sort(key=lambda collective: (-len(collective.entered), collective.group, collective.number))
    return tuple(collectives)


def _transfers(samples: JobSamples) -> dict[tuple[int, int], OpenCollective]:
    """Return the transfers of which both ranks are inside, by their ranks."""
    calls: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    found = {}
    for rank, sample in samples.ranks.items():
        for pending in sample.record.pending if sample.record else ():
            if pending.peer is not None:
                pair = _pair(rank, pending.peer)
                calls[pair][pending.operation] = rank
                if calls[pair].keys() == {"send", "recv"} and len({*calls[pair].values()}) == 2:
                    found[pair] = OpenCollective(
                        pending.group,
                        pending.number,
                        TRANSFER,
                        pair,
                        (),
                        (),
                        is_certain=True,
                        operations={TRANSFER: pair},
                    )
    return found


def _pair(rank: int, peer: int) -> tuple[int, int]:
    return min(rank, peer), max(rank, peer)


def members_of(group: str, samples: JobSamples, topology: Topology) -> tuple[int, ...]:
    """Return the ranks of a process group.

    If neither the records nor the name of the group shows them, they are those of the smallest parallel group with all
    ranks that used the process group. If two parallel groups are equally small, only the ranks that used it are known.
    """
    if recorded := samples.groups.get(group):
        return recorded
    if group == WORLD:
        return tuple(range(topology.world_size))
    seen = frozenset(rank for rank, sample in samples.ranks.items() if sample.record and group in sample.record.last)
    if not seen:
        return ()
    label = samples.labels.get(group, "")
    kinds = [kind for kind in topology.kinds if label.endswith(kind)] or list(topology.kinds)
    possible = {topology.group(min(seen), kind) for kind in kinds if topology.size(kind) > 1}
    fitting = sorted((ranks for ranks in possible if seen <= set(ranks)), key=len)
    if not fitting or (len(fitting) > 1 and len(fitting[0]) == len(fitting[1]) > len(seen)):
        return tuple(sorted(seen))
    return fitting[0]


def sinks(graph: WaitGraph, samples: JobSamples) -> tuple[Sink, ...]:
    """Return the ends of waiting, the sink with most ranks behind it first."""
    order = sorted(set(graph.edges) | {other for targets in graph.edges.values() for other in targets}, reverse=True)
    components = _components(order, graph.edges)
    component_of = {node: number for number, nodes in enumerate(components) for node in nodes}
    waiting = {
        component_of[node]
        for node, targets in graph.edges.items()
        for target in targets
        if component_of[target] != component_of[node]
    }
    stuck = {rank: collective for collective in graph.collectives if collective.is_stuck for rank in collective.entered}
    ends = [[node for node in nodes if node >= 0] for number, nodes in enumerate(components) if number not in waiting]
    ends += [[rank] for rank in _not_awaited(graph, samples) if rank not in component_of]
    waited: dict[int, list[int]] = defaultdict(list)
    for node, targets in graph.edges.items():
        for target in targets:
            waited[target].append(node)
    found: dict[tuple[int, ...], Sink] = {}
    for ranks in ends:
        first = ranks[0]
        collective = stuck.get(first) if len(ranks) == 1 and not samples.of(first).is_stopped else None
        key = collective.entered if collective else tuple(sorted(ranks))
        if key not in found and not (len(ranks) == 1 and first in graph.blind):
            found[key] = Sink(key, frozenset(_behind(key, waited, graph.blind)), collective)
    return tuple(sorted(found.values(), key=lambda sink: (-len(sink.behind), sink.ranks)))


def _not_awaited(graph: WaitGraph, samples: JobSamples) -> list[int]:
    """Return the ranks at the end of waiting that the edges of the graph do not show.

    These are the members of a stuck collective, the ranks inside a collective that their peers have finished and, if
    ranks wait for unknown ranks, each rank that delays itself.
    """
    ranks = [
        rank
        for collective in graph.collectives
        for rank in (collective.entered if collective.is_stuck else collective.lagging)
    ]
    if graph.blind:
        ranks += [rank for rank in samples.ranks if _delays_itself(rank, samples)]
    return [rank for rank in ranks if rank not in graph.edges]


def _delays_itself(rank: int, samples: JobSamples) -> bool:
    """Whether a rank is delayed by something of its own, and is not inside a collective.

    On a GPU, the stack alone does not show this: Python may be anywhere while the device waits in a collective.
    """
    sample = samples.of(rank)
    if sample.is_stopped:
        return True
    return sample.trainer is not None and sample.trainer.leaf.is_own and not (sample.record and sample.record.pending)


def _waits_in_python(sample: RankSample) -> bool:
    """Whether the stack of a rank inside a collective shows that it waits; on a GPU the stack may not show it."""
    return sample.trainer is not None and sample.trainer.leaf.kind in (LeafKind.COLLECTIVE, LeafKind.P2P)


def _is_reported(sample: RankSample) -> bool:
    """Whether a flight record or NCCL's RAS reports on the rank."""
    return sample.record is not None or sample.is_unresponsive


def _behind(ranks: Iterable[int], waited: Mapping[int, Iterable[int]], blind: Set[int]) -> set[int]:
    """Return the ranks that wait for some ranks, directly or through others, and all that wait for unknown ranks.

    Args:
        ranks: The ranks that are waited for.
        waited: Node of the graph → the nodes that wait for it.
        blind: The ranks that wait for unknown ranks.
    """
    seen, todo = set(ranks), list(ranks)
    while todo:
        for node in waited.get(todo.pop(), ()):
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return {node for node in seen if node >= 0}.union(blind) - set(ranks)


def _neighbours(rank: int, toward: str, topology: Topology) -> set[int]:
    """Return the ranks in the next and the previous pipeline stage, or in one of them if ``toward`` names it."""
    if topology.pp == 1:
        return set()
    line = topology.along(rank, ["pp"])
    at = line.index(rank)
    before, after = line[max(at - 1, 0) : at], line[at + 1 : at + 2]
    chosen = {"next": after, "previous": before}.get(toward)
    return set(chosen) if chosen else {*before, *after}


def _entered(rank: int, group: str, samples: JobSamples) -> int:
    record = samples.of(rank).record
    return record.last.get(group, -1) if record else -1


def _components(nodes: Sequence[int], edges: Mapping[int, Iterable[int]]) -> list[tuple[int, ...]]:
    """Return the strongly connected components of the graph: nodes that wait for each other (Tarjan's algorithm)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found = []
    for root in nodes:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(edges.get(root, ())))]
        while work:
            node, targets = work[-1]
            advanced = False
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(edges.get(target, ()))))
                    advanced = True
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            if advanced:
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                together = []
                while True:
                    member = stack.pop()
                    on_stack.discard(member)
                    together.append(member)
                    if member == node:
                        break
                found.append(tuple(together))
    return found
