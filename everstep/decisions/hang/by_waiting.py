"""Whom the others wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from everstep.decisions.hang.case import HangCase
from everstep.decisions.hang.conclusions import by_the_script, held_up, named, open_collectives_told, over_evicted
from everstep.decisions.hang.shared_group import shared_group
from everstep.decisions.hang.verdict import HangMethod, HangVerdict
from everstep.decisions.hang.wait_for import Sink, WaitGraph, sinks
from everstep.text import listed

LEAST_WAITING = 0.5
"""More than this share of the known ranks waits for those that are named; else the job may be computing (ours)."""
CLEARLY_BLAMED = 2
"""Of ranks that wait for each other one is named if so many times more ranks lack it than any other (ours)."""


def by_waiting(case: HangCase) -> HangVerdict | str:
    """Judge by who waits for whom; a text: why nobody is named."""
    ends = [sink for sink in sinks(case.graph, case.evidence) if sink.waiting or len(sink.ranks) > 1]
    circles = [sink for sink in ends if len(sink.ranks) > 1 and not sink.stuck]
    if not ends:
        return "no rank is seen to wait for another one"
    if len(circles) > 1 and len(circles) > len(ends) / 2:
        return by_the_script(case, circles, f"{len(circles)} times, ranks wait for each other in a circle")
    if too_few := _too_few_wait(case, ends):
        return too_few
    if len(ends) == 1 and ends[0].stuck:
        return _inside_one(case, ends[0])
    if len(ends) == 1 and circles:
        return _in_a_circle(case, circles[0])
    return _waited_for(case, ends)


def _too_few_wait(case: HangCase, ends: Sequence[Sink]) -> str:
    waiting = max(sink.waiting + (len(sink.ranks) if len(sink.ranks) > 1 else 0) for sink in ends)
    if waiting > LEAST_WAITING * max(case.known - 1, 1):
        return ""
    return f"at most {waiting} of {case.known} known ranks wait for the same ones: the job may be computing"


def _waited_for(case: HangCase, ends: Sequence[Sink]) -> HangVerdict | str:
    """Ranks that wait for nobody."""
    ranks = tuple(sorted(rank for sink in ends for rank in sink.ranks))
    silent = [rank for rank in ranks if not case.evidence.of(rank).is_known]
    if len({case.topology.machine(rank) for rank in silent}) > 1:
        return f"ranks wait for {listed(silent)}, of which nothing is known: get their stacks and records"
    if not case.few(ranks):
        return _shared(case, ranks, "others wait for them, and they are not seen to wait")
    waiting = max(sink.waiting for sink in ends)
    why = "; ".join(dict.fromkeys(held_up(rank, case.evidence) for rank in ranks))
    reason = f"{waiting} rank{'s wait' if waiting > 1 else ' waits'} for {'them' if len(ranks) > 1 else 'it'}; {why}"
    return named(case, ranks, HangMethod.WAIT_FOR, reason)


def _inside_one(case: HangCase, sink: Sink) -> HangVerdict | str:
    """All members of a group are inside one collective."""
    one = sink.stuck
    assert one is not None
    return _shared(
        case,
        sink.ranks,
        f"all {len(sink.ranks)} ranks of group {one.group} are inside {one.operation} {one.number}, which does not get "
        "done: the network, or a device, below them",
    )


def _in_a_circle(case: HangCase, sink: Sink) -> HangVerdict | str:
    """Ranks wait for each other."""
    lacks = _lacks(case.graph)
    first, second, *_ = sorted(sink.ranks, key=lambda rank: -lacks[rank])
    if lacks[first] >= CLEARLY_BLAMED * max(lacks[second], 1):
        reason = f"{lacks[first]} ranks are inside a collective that it has not entered; it waits for one of them"
        return named(case, (first,), HangMethod.WAIT_FOR, reason)
    if len(sink.ranks) > max(2, LEAST_WAITING * case.known):
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


def _lacks(graph: WaitGraph) -> Counter[int]:
    """Rank → how many ranks are inside collectives which it has not entered."""
    found: Counter[int] = Counter()
    for one in graph.collectives:
        for rank in one.missing:
            found[rank] += len(one.entered)
    return found
