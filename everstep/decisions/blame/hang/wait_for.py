"""The graph of waiting ranks.

A rank inside a collective waits for the members of its group that have not entered it; inside p2p for its neighbour;
ranks that do work of their own wait for no other rank. Following this from anywhere ends in a *sink*: ranks that wait
for nobody else. (All of this is ours: the paper looks at stacks only.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.decisions.blame.hang.rank_samples import WORLD, JobSamples, PendingOperation, RankSample
from everstep.decisions.blame.hang.stacks import LeafKind
from everstep.model.topology import Topology

FIRST = 1
"""Number of a group's first collective."""


@dataclass(frozen=True, slots=True)
class OpenCollective:
    """A collective that some ranks of its group entered and that is not done."""

    group: str
    number: int
    operation: str
    """The operation that most ranks inside the collective call."""
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    """Members that have not entered it."""
    passed: tuple[int, ...]
    """Members that are done with it: then it will get done, or records are of different moments."""
    is_certain: bool
    """Whether its members are known: a group that was never used before might have more than those inside of it."""
    operations: Mapping[str, tuple[int, ...]]
    """What is called, with sizes where all must have the same → by whom. More than one: they do not match."""

    @property
    def is_stuck(self) -> bool:
        """Whether all members are inside of it, and it does not get done."""
        return self.is_certain and len(self.entered) > 1 and not self.missing and not self.passed


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The graph of ranks and the ranks that they wait for."""

    edges: Mapping[int, frozenset[int]]
    """Rank → ranks that it waits for, and collectives: -1 is the first of them, -2 the second. A collective leads to
    those which have not entered it; so a thousand ranks that wait for a thousand others are two thousand edges."""
    by_frames: frozenset[int]
    """Ranks that wait for a neighbour by what their functions are called, and not by a record."""
    uncertain: frozenset[int]
    """Ranks that wait for a neighbour whose number their frames do not show."""
    blind: frozenset[int]
    """Ranks that wait, for whom is not known."""
    collectives: tuple[OpenCollective, ...]
    """The collectives in which ranks wait; the collective with most ranks inside is first."""

    def waits_for(self, rank: int) -> frozenset[int]:
        """Return the ranks that a rank waits for, directly."""
        targets = self.edges.get(rank, frozenset())
        return frozenset(other for target in targets for other in ((target,) if target >= 0 else self.edges[target]))


@dataclass(frozen=True, slots=True)
class Sink:
    """The end of a chain of waiting ranks."""

    ranks: tuple[int, ...]
    """One; or several that wait for each other, or that all entered a collective which does not get done."""
    behind: frozenset[int] = frozenset()
    """Other ranks that wait for these ranks, directly or through further ranks."""
    stuck: OpenCollective | None = None
    """All members of its group are inside of it."""


def wait_graph(evidence: JobSamples, topology: Topology) -> WaitGraph:
    """Return the waiting graph of all known ranks."""
    collectives = open_collectives(evidence, topology)
    inside: dict[int, list[int]] = defaultdict(list)
    edges: dict[int, frozenset[int]] = {}
    for number, one in enumerate(collectives):
        for rank in one.entered:
            inside[rank].append(number)
        if one.missing:
            edges[-1 - number] = frozenset(one.missing)
    stacks_tell = all(_waits_in_python(evidence.of(rank)) for rank in inside)
    by_frames, uncertain, blind = set(), set(), set()
    for rank, known in evidence.ranks.items():
        if known.is_stopped or not known.is_known:
            continue
        leaf = known.trainer.leaf if known.trainer else None
        by_records = _by_records(rank, evidence)
        targets = {-1 - number for number in inside[rank] if collectives[number].missing} | by_records
        if leaf and leaf.kind is LeafKind.P2P and not by_records:
            neighbours = _neighbours(rank, leaf.toward, topology)
            targets |= neighbours
            by_frames.add(rank)
            if len(neighbours) > 1:
                uncertain.add(rank)
        if targets:
            edges[rank] = frozenset(targets)
        elif ((leaf and (leaf.waits or not (stacks_tell or _has_told(known)))) or inside[rank]) and not any(
            collectives[one].is_stuck for one in inside[rank]
        ):
            blind.add(rank)
    return WaitGraph(edges, frozenset(by_frames), frozenset(uncertain), frozenset(blind), collectives)


def open_collectives(evidence: JobSamples, topology: Topology) -> tuple[OpenCollective, ...]:
    """The collectives that hold ranks up: of each rank and group the oldest that it has not finished."""
    by_number: dict[tuple[str, int], dict[int, PendingOperation]] = defaultdict(dict)
    for rank, known in evidence.ranks.items():
        for one in known.record.pending if known.record else ():
            if not one.is_p2p:
                by_number[one.group, one.number][rank] = one
    members = {group: members_of(group, evidence, topology) for group in {group for group, _ in by_number}}
    found = []
    for (group, number), entered in by_number.items():
        calls: dict[str, list[int]] = defaultdict(list)
        for rank, one in entered.items():
            calls[f"{one.operation} {one.sizes}".strip()].append(rank)
        common = max(calls.values(), key=len)
        found.append(
            OpenCollective(
                group,
                number,
                entered[common[0]].operation,
                tuple(sorted(entered)),
                tuple(rank for rank in members[group] if _entered(rank, group, evidence) < number),
                tuple(
                    rank for rank in members[group] if rank not in entered and _entered(rank, group, evidence) >= number
                ),
                bool(evidence.groups.get(group)) or number > FIRST or len(members[group]) > len(entered),
                {call: tuple(sorted(ranks)) for call, ranks in calls.items()},
            )
        )
    return tuple(sorted(found, key=lambda one: (-len(one.entered), one.group, one.number)))


def members_of(group: str, evidence: JobSamples, topology: Topology) -> tuple[int, ...]:
    """The ranks of a process group: by the records, by its name, else the smallest parallel group that has all those
    which used it, where exactly one has."""
    if told := evidence.groups.get(group):
        return told
    if group == WORLD:
        return tuple(range(topology.world_size))
    seen = frozenset(rank for rank, one in evidence.ranks.items() if one.record and group in one.record.last)
    if not seen:
        return ()
    label = evidence.labels.get(group, "")
    kinds = [kind for kind in topology.kinds if label.endswith(kind)] or list(topology.kinds)
    holding = {topology.group(min(seen), kind) for kind in kinds if topology.size(kind) > 1}
    fitting = sorted((ranks for ranks in holding if seen <= set(ranks)), key=len)
    if not fitting or (len(fitting) > 1 and len(fitting[0]) == len(fitting[1]) > len(seen)):
        return tuple(sorted(seen))
    return fitting[0]


def sinks(graph: WaitGraph, evidence: JobSamples) -> tuple[Sink, ...]:
    """Return the ends of waiting, the sink with most ranks behind it first."""
    order = sorted(set(graph.edges) | {other for targets in graph.edges.values() for other in targets}, reverse=True)
    components = _components(order, graph.edges)
    of = {node: number for number, nodes in enumerate(components) for node in nodes}
    leads_on = {of[node] for node, targets in graph.edges.items() for other in targets if of[other] != of[node]}
    stuck = {rank: collective for collective in graph.collectives if collective.is_stuck for rank in collective.entered}
    ends = [[node for node in nodes if node >= 0] for number, nodes in enumerate(components) if number not in leads_on]
    ends += [[rank] for rank in _alone(graph, evidence) if rank not in of]
    found: dict[tuple[int, ...], Sink] = {}
    for ranks in ends:
        first = ranks[0]
        one = stuck.get(first) if len(ranks) == 1 and not evidence.of(first).is_stopped else None
        key = one.entered if one else tuple(sorted(ranks))
        if key not in found and not (len(ranks) == 1 and first in graph.blind):
            found[key] = Sink(key, frozenset(_behind(key, graph)), one)
    return tuple(sorted(found.values(), key=lambda sink: (-len(sink.behind), sink.ranks)))


def _alone(graph: WaitGraph, evidence: JobSamples) -> list[int]:
    """Ranks for which nobody is known to wait: those inside a collective which all entered; and where others wait, for
    whom is not known, those which do something of their own."""
    found = [rank for collective in graph.collectives if collective.is_stuck for rank in collective.entered]
    if graph.blind:
        found += [rank for rank in evidence.ranks if _is_own(rank, evidence)]
    return [rank for rank in found if rank not in graph.edges]


def _is_own(rank: int, evidence: JobSamples) -> bool:
    """Whether a rank is held up by something of its own. With a GPU, Python is anywhere while the device waits in a
    collective: so none that is inside of one."""
    known = evidence.of(rank)
    if known.is_stopped:
        return True
    return known.trainer is not None and known.trainer.leaf.is_own and not (known.record and known.record.pending)


def _waits_in_python(known: RankSample) -> bool:
    """Whether a rank that is inside of a collective waits by its stack, too; with a GPU Python may be anywhere."""
    return known.trainer is not None and known.trainer.leaf.kind in (LeafKind.COLLECTIVE, LeafKind.P2P)


def _has_told(known: RankSample) -> bool:
    """Whether something but its stack says what a rank is inside of; that no record was read is no sign of that."""
    return known.record is not None or known.is_unresponsive


def _behind(ranks: Iterable[int], graph: WaitGraph) -> set[int]:
    """Those that wait for some ranks, directly or through others; where they might be, those that wait blindly too."""
    waited: dict[int, list[int]] = defaultdict(list)
    for node, targets in graph.edges.items():
        for target in targets:
            waited[target].append(node)
    seen, todo = set(ranks), list(ranks)
    while todo:
        for node in waited[todo.pop()]:
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return {node for node in seen | graph.blind if node >= 0} - set(ranks)


def _by_records(rank: int, evidence: JobSamples) -> set[int]:
    """Peers of what a rank sends or receives. One that is inside of the other side waits for it in turn: a pair."""
    record = evidence.of(rank).record
    return {one.peer for one in (record.pending if record else ()) if one.peer is not None}


def _neighbours(rank: int, toward: str, topology: Topology) -> set[int]:
    """The ranks before and after in the pipeline; a pipeline has two ends."""
    if topology.pp == 1:
        return set()
    line = topology.along(rank, ["pp"])
    at = line.index(rank)
    before, after = line[max(at - 1, 0) : at], line[at + 1 : at + 2]
    chosen = {"next": after, "previous": before}.get(toward)
    return set(chosen) if chosen else {*before, *after}


def _entered(rank: int, group: str, evidence: JobSamples) -> int:
    record = evidence.of(rank).record
    return record.last.get(group, -1) if record else -1


def _components(nodes: Sequence[int], edges: Mapping[int, Iterable[int]]) -> list[tuple[int, ...]]:
    """Return nodes that wait for each other, directly or in a circle (Tarjan's strongly connected components)."""
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
