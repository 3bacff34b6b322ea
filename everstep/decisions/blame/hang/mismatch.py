"""Ranks that call different collectives at the same place: the script's doing, unless one rank alone does."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.base.text import listed
from everstep.decisions.blame.hang.verdict import HangConclusion, HangMethod, HangVerdict, names_of
from everstep.decisions.blame.hang.wait_for import OpenCollective, WaitGraph
from everstep.model.topology import Topology

CLEAR_MAJORITY = 3
"""The others must be so many times more than those which differ, for these to be named."""


def judge_mismatch(graph: WaitGraph, topology: Topology, names: Sequence[str]) -> HangVerdict | None:
    """Judge collectives whose members do not call the same; None: there are none.

    A few ranks of one machine that call, in one group, what the clear majority does not, skipped a collective or did
    one too many: they are named. Where groups that share no machine mismatch, or the group is divided, the script calls
    collectives in an order that cannot work on any machine.
    """
    wrong = [one for one in graph.collectives if len(one.operations) > 1]
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
