"""The judgement of a hang by the ranks that the other ranks wait for.

First it is checked whether the members of each group call the same collectives (``judge_mismatch``). Then the graph is
followed from each rank that waits to the ranks at its end (``by_waiting``).

The ranks at the end may wait for each other in a circle, because one of them skipped a collective. That rank waits in
the next collective for ranks that wait for it in the skipped one. The number of ranks that wait for it does not show
which rank it is, but the order of its operations does (``out_of_order``). Before the same operation, its peers in the
same stage all called the same number of operations of each other kind of group, and this rank called another number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from everstep.base.text import listed
from everstep.decisions.blame.hang.conclusions import (
    HangCase,
    by_the_script,
    describe_collectives,
    held_up,
    named,
    over_evicted,
)
from everstep.decisions.blame.hang.outliers import stage_of
from everstep.decisions.blame.hang.rank_samples import WORLD, JobSamples
from everstep.decisions.blame.hang.shared_group import shared_group
from everstep.decisions.blame.hang.verdict import HangVerdict, names_of
from everstep.decisions.blame.hang.wait_for import (
    CLEAR_MAJORITY,
    TRANSFER,
    OpenCollective,
    Sink,
    WaitGraph,
    members_of,
    sinks,
)
from everstep.model.hang import HangConclusion, HangMethod
from everstep.model.topology import Topology

MOST_PEERS = 8
"""Number of peers with which a rank is compared."""


def out_of_order(ranks: Sequence[int], samples: JobSamples, topology: Topology) -> int | None:
    """Return which one of the ranks that wait for each other called collectives in another order than its peers.

    If no rank differs, return the only rank that cannot be compared: no peer has entered the collective in which it
    waits. None: there is no such rank, or more than one.
    """
    orders, waiting = _CallOrders(samples, topology), set(ranks)
    peers: dict[int, list[int]] = defaultdict(list)
    for rank in range(topology.world_size):
        if rank not in waiting:
            peers[stage_of(rank, topology)].append(rank)
    is_odd = {rank: orders.is_odd(rank, peers[stage_of(rank, topology)]) for rank in ranks}
    odd = [rank for rank in ranks if is_odd[rank]] or [rank for rank in ranks if is_odd[rank] is None]
    return odd[0] if len(odd) == 1 else None


class _CallOrders:
    """Compares the orders in which ranks called their newest operations.

    Groups are compared by their kind, so most ranks of a job have one of a few orders, and each of them is read once.
    """

    def __init__(self, samples: JobSamples, topology: Topology) -> None:
        self._samples = samples
        self._topology = topology
        self._kinds: dict[str, str] = {}
        """Group → its kind."""
        self._numbers: dict[Hashable, int] = {}
        """Order → its index in ``_before``."""
        self._before: list[Mapping[tuple[str, int], Mapping[str, int]]] = []
        """For each order: operation, as kind of group and number → the newest number of each kind before it."""
        self._same: dict[tuple[int, int], bool | None] = {}
        """Indices of two orders → whether they are the same; None: they have no operation in common."""

    def is_odd(self, rank: int, peers: Iterable[int]) -> bool | None:
        """Compare the operations of a rank with those of its peers in the same stage.

        Returns:
            Whether most peers called other numbers of operations before an operation that the rank called, too; None if
            no peer called such an operation.
        """
        mine, differing, alike = self._order(rank), 0, 0
        for peer in peers:
            same = self._are_same(mine, self._order(peer))
            if same is not None:
                alike, differing = alike + same, differing + (not same)
                if differing + alike == MOST_PEERS:
                    break
        return differing > alike if differing + alike else None

    def _order(self, rank: int) -> int:
        record = self._samples.of(rank).record
        kinds = tuple(map(self._kind, record.called)) if record else ()
        key = (record.order if record else (), kinds)
        number = self._numbers.setdefault(key, len(self._before))
        if number == len(self._before):
            newest: dict[str, int] = {}
            before = {}
            for index, call, is_p2p in record.order if record else ():
                kind = f"{kinds[index]}{' p2p' * is_p2p}"
                before[kind, call] = dict(newest)
                newest[kind] = call
            self._before.append(before)
        return number

    def _are_same(self, mine: int, theirs: int) -> bool | None:
        if (mine, theirs) not in self._same:
            own, other = self._before[mine], self._before[theirs]
            common = own.keys() & other.keys()
            same = all(
                own[operation].get(kind, number) == number
                for operation in common
                for kind, number in other[operation].items()
            )
            self._same[mine, theirs] = same if common else None
        return self._same[mine, theirs]

    def _kind(self, group: str) -> str:
        if group not in self._kinds:
            self._kinds[group] = _kind(group, self._samples, self._topology)
        return self._kinds[group]


def _kind(group: str, samples: JobSamples, topology: Topology) -> str:
    members = members_of(group, samples, topology)
    if group == WORLD or not members:
        return group
    return next((kind for kind in topology.kinds if topology.group(members[0], kind) == members), group)


def judge_mismatch(graph: WaitGraph, topology: Topology, names: Sequence[str]) -> HangVerdict | None:
    """Judge collectives whose members call different operations; None: there are no such collectives.

    If a few ranks of one machine differ from a clear majority, these ranks are named: they skipped a collective or
    called one too many. Otherwise the script calls collectives in an order that cannot work on any machine.
    """
    wrong = [collective for collective in graph.collectives if len(collective.operations) > 1]
    if not wrong:
        return None
    minorities = [_minority(collective) for collective in wrong]
    few = sorted({rank for minority in minorities for rank in minority})
    machines = {topology.machine(rank) for rank in few}
    divided = any(
        len(minority) * CLEAR_MAJORITY > len(collective.entered) - len(minority)
        for collective, minority in zip(wrong, minorities, strict=True)
    )
    evidence = tuple(map(_calls_text, wrong[:3]))
    if divided or len(machines) > 1:
        return HangVerdict(
            HangConclusion.NOT_A_MACHINE,
            HangMethod.WAIT_FOR,
            "ranks of a group call different collectives at the same time, on several machines or in similar numbers: "
            "the script calls collectives in the wrong order",
            evidence=evidence,
        )
    (machine,) = machines
    return HangVerdict(
        HangConclusion.NAMES,
        HangMethod.WAIT_FOR,
        f"rank {listed(few)} on {names_of([machine], names)[0]} calls another collective than the other ranks of its "
        "group: it skipped a collective, or called one too many",
        tuple(few),
        (machine,),
        evidence=evidence,
    )


def _minority(collective: OpenCollective) -> tuple[int, ...]:
    """Return the ranks that call another operation than most ranks do."""
    most = max(collective.operations.values(), key=len)
    return tuple(rank for ranks in collective.operations.values() if ranks is not most for rank in ranks)


def _calls_text(collective: OpenCollective) -> str:
    calls = "; ".join(f"{call} by rank {listed(ranks)}" for call, ranks in collective.operations.items())
    return f"collective {collective.number} of group {collective.group}: {calls}"


LEAST_WAITING = 0.5
"""A rank is named only if more than this share of the known ranks waits for it; otherwise the job may be computing."""


def by_waiting(case: HangCase) -> HangVerdict | str:
    """Return the verdict by the ranks that other ranks wait for, or a text: why there is no verdict."""
    if ready := _ready(case):
        return ready
    all_ends = [sink for sink in sinks(case.graph, case.samples) if sink.behind or len(sink.ranks) > 1]
    ends = [sink for sink in all_ends if not (case.graph.blind and _is_by_frames(case, sink))]
    circles = [sink for sink in ends if len(sink.ranks) > 1 and not sink.stuck]
    if not ends:
        return _crossed(case) or _without_ends(case, all_ends)
    if len(circles) > 1 and len(circles) > len(ends) / 2 and not any(_is_by_frames(case, sink) for sink in circles):
        return by_the_script(case, circles, f"ranks wait for each other in {len(circles)} circles")
    seen = [sink for sink in ends if any(_is_seen(case, rank) for rank in sink.ranks)]
    if 0 < len(seen) < len(ends) and not (_too_few_wait(case, seen) and _too_few_wait(case, [_all_of(ends)])):
        return _beside_unseen(case, seen, [rank for sink in ends if sink not in seen for rank in sink.ranks])
    if too_few := _too_few_wait(case, ends):
        return _of_several(case, ends) or too_few
    return _judge_ends(case, ends)


def _all_of(ends: Sequence[Sink]) -> Sink:
    """Return several ends as one. A rank that was not sampled may itself wait for one of the other ends."""
    return Sink((), frozenset(rank for sink in ends for rank in sink.behind))


def _ready(case: HangCase) -> str:
    """Return why a single sample may come from a job that does not hang; empty: there is no such reason.

    The reason is that operations in several places have all of their ranks, so they may finish at any moment.
    """
    ready = [collective for collective in case.graph.collectives if collective.is_stuck]
    if case.samples.moved is not None or case.samples.is_hung or len(ready) < 2:
        return ""
    if set(ready[0].entered).intersection(*(collective.entered for collective in ready[1:])):
        return ""  # the device of one rank may be at fault
    return f"{len(ready)} operations have all of their ranks: the job may be running, and a second sample would show it"


def _judge_ends(case: HangCase, ends: Sequence[Sink]) -> HangVerdict | str:
    """Judge the ends of waiting by their number and kind."""
    only = ends[0]
    if len(ends) > 1 or (not only.stuck and len(only.ranks) == 1):
        return _waited_for(case, ends)
    return _inside_one(case, only) if only.stuck else _in_a_circle(case, only)


def _is_seen(case: HangCase, rank: int) -> bool:
    sample = case.samples.of(rank)
    return sample.is_known or sample.is_unresponsive


def _beside_unseen(case: HangCase, ends: Sequence[Sink], unseen: Sequence[int]) -> HangVerdict | str:
    """Judge the ends of which something is known, although ranks also wait for ranks that were not sampled.

    A machine whose agent did not answer in time is not blamed as long as another rank is seen to be at fault.
    """
    verdict = _judge_ends(case, ends)
    if isinstance(verdict, str):
        return verdict
    line = f"ranks also wait for rank {listed(sorted(unseen))}, of which nothing is known: that is no sign of a fault"
    return replace(verdict, evidence=(line, *verdict.evidence))


def _is_by_frames(case: HangCase, sink: Sink) -> bool:
    """Whether only names of functions show that ranks wait in a circle: one of them may already have finished."""
    return len(sink.ranks) > 1 and sink.stuck is None and bool(case.graph.by_frames & set(sink.ranks))


def _without_ends(case: HangCase, ends: Sequence[Sink]) -> str:
    if not ends:
        return "no rank is seen to wait for another rank"
    circle = sorted(rank for sink in ends for rank in sink.ranks)
    return (
        f"by their frames, rank {listed(circle)} wait for each other, and {len(case.graph.blind)} ranks wait for "
        "unknown ranks: flight records would show more"
    )


def _too_few_wait(case: HangCase, ends: Sequence[Sink]) -> str:
    waiting = max(len(sink.behind) + (len(sink.ranks) if len(sink.ranks) > 1 else 0) for sink in ends)
    if waiting > LEAST_WAITING * max(case.known - 1, 1):
        return ""
    return f"at most {waiting} of {case.known} known ranks wait for the same ranks: the job may be computing"


def _crossed(case: HangCase) -> HangVerdict | None:
    """Blame the script if ranks on many machines miss a collective because they entered another one.

    The other collective is of a group that was not used before.
    """
    elsewhere = {rank for unused in case.graph.collectives if not unused.is_certain for rank in unused.entered}
    for collective in case.graph.collectives:
        entered, missing = collective.entered, collective.missing
        if not missing or not elsewhere.issuperset(missing):
            continue
        if not case.on_few_machines(missing) and not case.on_few_machines(entered):
            where = f"{collective.operation} of group {collective.group}"
            what = f"{len(entered)} ranks are in {where}, and the others are in another collective"
            return by_the_script(case, [Sink(tuple(sorted((*entered, *missing))))], what)
    return None


def _of_several(case: HangCase, ends: Sequence[Sink]) -> HangVerdict | None:
    """Judge a group for which all other ranks wait, although most ranks do not wait for the same rank of the group.

    A pipeline looks like this if its point-to-point operations are not recorded, as on gloo, and there are no stacks.
    """
    ranks = tuple(sorted(rank for sink in ends for rank in sink.ranks))
    waiting = len({rank for sink in ends for rank in sink.behind} - set(ranks))
    if waiting < case.known - len(ranks) or waiting <= LEAST_WAITING * case.known:
        return None
    verdict = _shared(case, ranks, "all other ranks wait for them, and they are not seen to wait")
    return verdict if isinstance(verdict, HangVerdict) else None


def _waited_for(case: HangCase, ends: Sequence[Sink]) -> HangVerdict | str:
    """Judge ranks that wait for no other rank."""
    ranks = tuple(sorted(rank for sink in ends for rank in sink.ranks))
    silent = [rank for rank in ranks if not case.samples.of(rank).is_known]
    if len({case.topology.machine(rank) for rank in silent}) > 1:
        return f"ranks wait for rank {listed(silent)}, of which nothing is known: sample their stacks and records"
    if not case.on_few_machines(ranks):
        if _may_move(case, ranks):
            return f"ranks wait for rank {listed(ranks)}, which may be computing: a second sample would show it"
        return _shared(case, ranks, "other ranks wait for them, and they are not seen to wait")
    waiting = max(len(sink.behind) for sink in ends)
    stuck = {rank: sink.stuck for sink in ends if sink.stuck for rank in sink.ranks}
    why = "; ".join(dict.fromkeys(_why_waited_for(case, rank, stuck.get(rank)) for rank in ranks))
    reason = f"{waiting} rank{'s wait' if waiting > 1 else ' waits'} for {'them' if len(ranks) > 1 else 'it'}; {why}"
    return named(case, ranks, HangMethod.WAIT_FOR, reason)


def _why_waited_for(case: HangCase, rank: int, stuck: OpenCollective | None) -> str:
    if stuck is not None:
        return f"it is inside {stuck.operation}, which does not finish although all of its ranks are inside"
    if any(rank in collective.lagging for collective in case.graph.collectives):
        return "it does not finish a collective that all other ranks of its group have finished"
    return held_up(rank, case.samples)


def _may_move(case: HangCase, ranks: Sequence[int]) -> bool:
    """Whether only one sample of stacks is known. Records alone prove more: they are written after long waits."""
    return (
        not case.samples.is_hung and case.samples.moved is None and any(case.samples.of(rank).trainer for rank in ranks)
    )


def _inside_one(case: HangCase, sink: Sink) -> HangVerdict | str:
    """Judge a group of which all members are inside one collective."""
    stuck = sink.stuck
    assert stuck is not None
    if _may_move(case, sink.ranks):
        return f"group {stuck.group} is inside {stuck.operation}, maybe for a moment: a second sample would show it"
    if stuck.operation == TRANSFER:
        return named(case, sink.ranks, HangMethod.WAIT_FOR, "one sends to the other, and this does not finish")
    return _shared(
        case,
        sink.ranks,
        f"all {len(sink.ranks)} ranks of group {stuck.group} are inside {stuck.operation} {stuck.number}, which does "
        "not finish: the network or a device is at fault",
    )


def _in_a_circle(case: HangCase, sink: Sink) -> HangVerdict | str:
    """Judge ranks that wait for each other."""
    if (odd := out_of_order(sink.ranks, case.samples, case.topology)) is not None:
        reason = (
            "it waits for ranks that wait for it, and its collectives are in another order than those of its peers: it "
            "skipped a collective, or called one too many"
        )
        return named(case, (odd,), HangMethod.WAIT_FOR, reason)
    if len(sink.ranks) > max(2, LEAST_WAITING * case.known) and not _is_by_frames(case, sink):
        return by_the_script(case, [sink], f"{len(sink.ranks)} ranks wait for each other in a circle")
    if len(sink.ranks) == 2 and not case.graph.uncertain & set(sink.ranks):
        return named(
            case, sink.ranks, HangMethod.WAIT_FOR, "they wait for each other, and the other ranks wait for them"
        )
    return _shared(case, sink.ranks, "they wait for each other")


def _shared(case: HangCase, ranks: Sequence[int], what: str) -> HangVerdict | str:
    """Evict the group that the ranks at the end of waiting share, or return why there is none to evict."""
    shared = shared_group(ranks, case.topology, most_of_job=case.limits.most_over_evicted)
    if shared is None or shared.unexplained:
        return f"rank {listed(ranks)}: {what}; they share no group that is small enough to be evicted"
    return over_evicted(case, ranks, shared, HangMethod.WAIT_FOR, what, evidence=describe_collectives(case.graph))
