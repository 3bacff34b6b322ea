"""Which of the ranks that wait for each other is at a place where its peers never were.

A rank that skipped a collective waits in the next one for those that wait for it in the one that it skipped. Counting
who is waited for blames the wrong one of them as often as not. So the order is compared: when its peers in the same
stage entered the collective in which a rank waits now, they had entered as many of each other kind of group; one that
has not is the odd one. (Ours.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.decisions.blame.hang.evidence import WORLD, HangEvidence
from everstep.decisions.blame.hang.outliers import stage_of
from everstep.decisions.blame.hang.wait_for import members_of
from everstep.model.topology import Topology

MOST_PEERS = 8
"""Peers that a rank is compared with."""


def out_of_order(ranks: Sequence[int], evidence: HangEvidence, topology: Topology) -> int | None:
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
    rank: int, ranks: Sequence[int], evidence: HangEvidence, topology: Topology, kinds: dict[str, str]
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


def _order(rank: int, evidence: HangEvidence, topology: Topology, kinds: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """Kind of group and number of the newest collectives of a rank: groups of one kind count alike."""
    record = evidence.of(rank).record
    found = []
    for group, number in record.order if record else ():
        if group not in kinds:
            kinds[group] = _kind(group, evidence, topology)
        found.append((kinds[group], number))
    return tuple(found)


def _kind(group: str, evidence: HangEvidence, topology: Topology) -> str:
    members = members_of(group, evidence, topology)
    if group == WORLD or not members:
        return group
    return next((kind for kind in topology.kinds if topology.group(members[0], kind) == members), group)


def _reached(order: Sequence[tuple[str, int]]) -> Mapping[str, int]:
    """Kind of group → number of the newest collective."""
    return dict(order)
