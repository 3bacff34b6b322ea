"""The judgement of a hang by the ranks that the other ranks wait for.

Collectives that do not match are judged first: a few ranks of one machine that call what all others of their group do
not, skipped a collective or did one too many. Where that is not so, the script calls them in the wrong order.

A rank that skipped a collective waits in the next one for those that wait for it in the one that it skipped. A count of
the waiting ranks blames the wrong rank as often as not. So the order is compared: when its peers in the same
stage entered the collective in which a rank waits now, they had entered as many of each other kind of group. A rank
that has not is the odd one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from everstep.base.text import listed
from everstep.decisions.blame.hang.conclusions import (
    HangCase,
    by_the_script,
    held_up,
    named,
    open_collectives_told,
    over_evicted,
)
from everstep.decisions.blame.hang.outliers import stage_of
from everstep.decisions.blame.hang.rank_samples import WORLD, JobSamples
from everstep.decisions.blame.hang.shared_group import shared_group
from everstep.decisions.blame.hang.verdict import HangVerdict, names_of
from everstep.decisions.blame.hang.wait_for import OpenCollective, Sink, WaitGraph, members_of, sinks
from everstep.model.hang import HangConclusion, HangMethod
from everstep.model.topology import Topology

MOST_PEERS = 8
"""Peers that a rank is compared with."""


def out_of_order(ranks: Sequence[int], evidence: JobSamples, topology: Topology) -> int | None:
    """The one rank, of some that wait for each other, whose collectives are in another order than its peers'.

    Where none is seen to be, and all but one are seen not to be, it is that one: it came to where no peer has been.
    None: more than one is, or it cannot be told.
    """
    kinds: dict[str, str] = {}
    odd = {rank: _is_odd(rank, ranks, evidence, topology, kinds) for rank in ranks}
    found = [rank for rank, is_odd in odd.items() if is_odd]
    if not found:
        found = [rank for rank, is_odd in odd.items() if is_odd is None]
    return found[0] if len(found) == 1 else None


def _is_odd(
    rank: int, ranks: Sequence[int], evidence: JobSamples, topology: Topology, kinds: dict[str, str]
) -> bool | None:
    """Whether most peers were elsewhere in the other groups when they entered what a rank waits in; None: none did."""
    order = _order(rank, evidence, topology, kinds)
    if not order:
        return None
    newest, before = order[-1], _reached(order[:-1])
    stage, differing, alike = stage_of(rank, topology), 0, 0
    for peer in range(topology.world_size):
        if peer in ranks or stage_of(peer, topology) != stage or differing + alike >= MOST_PEERS:
            continue
        theirs = _order(peer, evidence, topology, kinds)
        if newest in theirs:
            then = _reached(theirs[: theirs.index(newest)])
            same = all(before[kind] == number for kind, number in then.items() if kind in before)
            alike, differing = alike + same, differing + (not same)
    return differing > alike if differing + alike else None


def _order(rank: int, evidence: JobSamples, topology: Topology, kinds: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """Kind of group and number of the newest collectives of a rank: groups of one kind count alike."""
    record = evidence.of(rank).record
    found = []
    for group, number in record.order if record else ():
        if group not in kinds:
            kinds[group] = _kind(group, evidence, topology)
        found.append((kinds[group], number))
    return tuple(found)


def _kind(group: str, evidence: JobSamples, topology: Topology) -> str:
    members = members_of(group, evidence, topology)
    if group == WORLD or not members:
        return group
    return next((kind for kind in topology.kinds if topology.group(members[0], kind) == members), group)


def _reached(order: Sequence[tuple[str, int]]) -> Mapping[str, int]:
    """Kind of group → number of the newest collective."""
    return dict(order)


CLEAR_MAJORITY = 3
"""The others must be so many times more than those which differ, for these to be named."""


def judge_mismatch(graph: WaitGraph, topology: Topology, names: Sequence[str]) -> HangVerdict | None:
    """Judge collectives whose members do not call the same; None: there are none.

    A few ranks of one machine that call, in one group, what the clear majority does not, skipped a collective or did
    one too many: they are named. Where groups that share no machine mismatch, or the group is divided, the script calls
    collectives in an order that cannot work on any machine.
    """
    wrong = [collective for collective in graph.collectives if len(collective.operations) > 1]
    if not wrong:
        return None
    few = sorted({rank for one in wrong for rank in _few(one)})
    machines = {topology.machine(rank) for rank in few}
    divided = any(len(_few(one)) * CLEAR_MAJORITY > len(one.entered) - len(_few(one)) for one in wrong)
    told = tuple(_told(one) for one in wrong[:3])
    if divided or len(machines) > 1:
        return HangVerdict(
            HangConclusion.NOT_A_MACHINE,
            HangMethod.WAIT_FOR,
            "ranks call different collectives at the same place of a group, and it is not a few ranks of one machine "
            "against all others of it: the script calls them in the wrong order",
            evidence=told,
        )
    (machine,) = machines
    return HangVerdict(
        HangConclusion.NAMES,
        HangMethod.WAIT_FOR,
        f"rank {listed(few)} on {names_of([machine], names)[0]} is at another collective than all others of its "
        "group: it skipped one, or did one too many",
        tuple(few),
        (machine,),
        evidence=told,
    )


def _few(one: OpenCollective) -> tuple[int, ...]:
    """Those who do not call what most call."""
    most = max(one.operations.values(), key=len)
    return tuple(rank for ranks in one.operations.values() if ranks is not most for rank in ranks)


def _told(one: OpenCollective) -> str:
    calls = "; ".join(f"{call} by rank {listed(ranks)}" for call, ranks in one.operations.items())
    return f"collective {one.number} of group {one.group}: {calls}"


LEAST_WAITING = 0.5
"""More than this share of the known ranks waits for those that are named; else the job may be computing."""


def by_waiting(case: HangCase) -> HangVerdict | str:
    """Judge by the ranks that other ranks wait for; a text: why no rank is named."""
    all_ends = [sink for sink in sinks(case.graph, case.evidence) if sink.behind or len(sink.ranks) > 1]
    ends = [sink for sink in all_ends if not (case.graph.blind and _is_by_frames(case, sink))]
    circles = [sink for sink in ends if len(sink.ranks) > 1 and not sink.stuck]
    if not ends:
        return _crossed(case) or _nobody(case, all_ends)
    if len(circles) > 1 and len(circles) > len(ends) / 2 and not any(_is_by_frames(case, sink) for sink in circles):
        return by_the_script(case, circles, f"{len(circles)} times, ranks wait for each other in a circle")
    if too_few := _too_few_wait(case, ends):
        return _of_several(case, ends) or too_few
    seen = [sink for sink in ends if any(_is_seen(case, rank) for rank in sink.ranks)]
    if seen and len(seen) < len(ends) and not _too_few_wait(case, seen):
        return _beside_unseen(case, seen, [rank for sink in ends if sink not in seen for rank in sink.ranks])
    return _of_ends(case, ends)


def _of_ends(case: HangCase, ends: Sequence[Sink]) -> HangVerdict | str:
    """Judge the ends of waiting by their number and kind."""
    only = ends[0]
    if len(ends) > 1 or (not only.stuck and len(only.ranks) == 1):
        return _waited_for(case, ends)
    return _inside_one(case, only) if only.stuck else _in_a_circle(case, only)


def _is_seen(case: HangCase, rank: int) -> bool:
    known = case.evidence.of(rank)
    return known.is_known or known.is_unresponsive


def _beside_unseen(case: HangCase, ends: Sequence[Sink], unseen: Sequence[int]) -> HangVerdict | str:
    """Judge by ranks of which something is known, where the others wait for them and for ranks that were not sampled:
    that a machine did not answer in time is no sign of a fault, while there is one to be seen."""
    found = _of_ends(case, ends)
    if isinstance(found, str):
        return found
    told = f"they wait for rank {listed(sorted(unseen))} too, of which nothing is known: that is no sign of a fault"
    return replace(found, evidence=(told, *found.evidence))


def _is_by_frames(case: HangCase, sink: Sink) -> bool:
    """Whether ranks wait for each other by what their functions are called: one of them may be done with it."""
    return len(sink.ranks) > 1 and sink.stuck is None and bool(case.graph.by_frames & set(sink.ranks))


def _nobody(case: HangCase, ends: Sequence[Sink]) -> str:
    if not ends:
        return "no rank is seen to wait for another one"
    faced = sorted(rank for sink in ends for rank in sink.ranks)
    return (
        f"rank {listed(faced)} wait for each other by their frames, and {len(case.graph.blind)} ranks for whom is not "
        "known: flight records would say"
    )


def _too_few_wait(case: HangCase, ends: Sequence[Sink]) -> str:
    waiting = max(len(sink.behind) + (len(sink.ranks) if len(sink.ranks) > 1 else 0) for sink in ends)
    if waiting > LEAST_WAITING * max(case.known - 1, 1):
        return ""
    return f"at most {waiting} of {case.known} known ranks wait for the same ones: the job may be computing"


def _crossed(case: HangCase) -> HangVerdict | None:
    """Ranks of many machines lack a collective because they are in another one, of a group that was never used."""
    elsewhere = {
        rank for collective in case.graph.collectives if not collective.is_certain for rank in collective.entered
    }
    for one in case.graph.collectives:
        if one.missing and elsewhere >= set(one.missing) and not case.few(one.missing) and not case.few(one.entered):
            sink = Sink(tuple(sorted((*one.entered, *one.missing))))
            what = (
                f"{len(one.entered)} ranks are in {one.operation} of group {one.group}, and the others in another one"
            )
            return by_the_script(case, [sink], what)
    return None


def _of_several(case: HangCase, ends: Sequence[Sink]) -> HangVerdict | None:
    """Judge a group that all other ranks wait for together, although no single rank of it is awaited by most.

    So a pipeline looks whose point-to-point waiting is not recorded: gloo's is not, and there may be no stacks.
    """
    ranks = tuple(sorted(rank for sink in ends for rank in sink.ranks))
    waiting = len({rank for sink in ends for rank in sink.behind} - set(ranks))
    if waiting < case.known - len(ranks) or waiting <= LEAST_WAITING * case.known:
        return None
    found = _shared(case, ranks, "all others wait for them, and they are not seen to wait")
    return found if isinstance(found, HangVerdict) else None


def _waited_for(case: HangCase, ends: Sequence[Sink]) -> HangVerdict | str:
    """Judge ranks that wait for no other rank."""
    ranks = tuple(sorted(rank for sink in ends for rank in sink.ranks))
    silent = [rank for rank in ranks if not case.evidence.of(rank).is_known]
    if len({case.topology.machine(rank) for rank in silent}) > 1:
        return f"ranks wait for {listed(silent)}, of which nothing is known: get their stacks and records"
    if not case.few(ranks):
        if _may_move(case, ranks):
            return f"rank {listed(ranks)} are waited for and may be computing: a second sample would show it"
        return _shared(case, ranks, "others wait for them, and they are not seen to wait")
    waiting = max(len(sink.behind) for sink in ends)
    why = "; ".join(dict.fromkeys(held_up(rank, case.evidence) for rank in ranks))
    reason = f"{waiting} rank{'s wait' if waiting > 1 else ' waits'} for {'them' if len(ranks) > 1 else 'it'}; {why}"
    return named(case, ranks, HangMethod.WAIT_FOR, reason)


def _may_move(case: HangCase, ranks: Sequence[int]) -> bool:
    """Whether there was one sample only, at stacks. Records alone are written by ranks that waited long enough."""
    return (
        not case.evidence.is_hung
        and case.evidence.moved is None
        and any(case.evidence.of(rank).trainer for rank in ranks)
    )


def _inside_one(case: HangCase, sink: Sink) -> HangVerdict | str:
    """All members of a group are inside one collective."""
    one = sink.stuck
    assert one is not None
    if _may_move(case, sink.ranks):
        return f"group {one.group} is inside {one.operation}, maybe for a moment: a second sample would show it"
    return _shared(
        case,
        sink.ranks,
        f"all {len(sink.ranks)} ranks of group {one.group} are inside {one.operation} {one.number}, which does not get "
        "done: the network, or a device, below them",
    )


def _in_a_circle(case: HangCase, sink: Sink) -> HangVerdict | str:
    """Judge ranks that wait for each other."""
    if (odd := out_of_order(sink.ranks, case.evidence, case.topology)) is not None:
        reason = (
            "it waits for ranks that wait for it, and its collectives are not in the order of its peers': it skipped "
            "one, or did one too many"
        )
        return named(case, (odd,), HangMethod.WAIT_FOR, reason)
    if len(sink.ranks) > max(2, LEAST_WAITING * case.known) and not _is_by_frames(case, sink):
        return by_the_script(case, [sink], f"{len(sink.ranks)} ranks wait for each other in a circle")
    if len(sink.ranks) == 2 and not case.graph.uncertain & set(sink.ranks):
        return named(case, sink.ranks, HangMethod.WAIT_FOR, "they wait for each other, and the others for them")
    return _shared(case, sink.ranks, "they wait for each other")


def _shared(case: HangCase, ranks: Sequence[int], what: str) -> HangVerdict | str:
    """The group that several ranks share at which waiting ends."""
    shared = shared_group(ranks, case.topology, most_of_job=case.limits.most_over_evicted)
    if shared is None or shared.unexplained:
        return f"rank {listed(ranks)}: {what}; they share no group that is small enough to be evicted"
    return over_evicted(case, ranks, shared, HangMethod.WAIT_FOR, what, evidence=open_collectives_told(case.graph))
