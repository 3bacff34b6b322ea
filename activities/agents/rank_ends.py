"""Gathers the ends of a job's ranks: ranks that ended in the same way are one entry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from agent.state.rank_record import exit_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.first_failure import by_first_failure, is_own
from everstep.model.evidence import RankExit
from everstep.model.ranks import Ranks

APART = 32
"""The number of ranks whose ends are entries of their own; these are the ranks that ended first by themselves."""
WITH_OUTPUT = 8
"""The number of ranks among them whose output is kept."""
LINE = 300
"""The largest number of characters in the line of an exception."""
TEXTS = 64
"""The largest number of different lines of exceptions; of the other exceptions, only the class is kept."""


def ends_of(ranks: Iterable[tuple[str, pb.RankEnd]]) -> list[RankExit]:
    """Return the ends of all ranks, in the order of their first ranks; each rank is given with its machine.

    The agents have already classified each end by its full output.
    """
    every = [exit_of(machine, end) for machine, end in ranks]
    own = sorted(filter(is_own, every), key=by_first_failure)
    shown = {id(end) for end in own[:APART]}
    with_output = {id(end) for end in own[:WITH_OUTPUT]} if len(own) > APART else shown
    texts = dict.fromkeys(end.exception[:LINE] for end in every)
    few = len(texts) <= TEXTS
    apart, alike = [], defaultdict(list)
    for end in every:
        if id(end) in shown:
            line = end.model_copy(update={"exception": end.exception[:LINE]})
            apart.append(line if id(end) in with_output else _bare(line))
            continue
        exception = end.exception[:LINE] if few else end.exception.partition(":")[0][:LINE]
        bare = _bare(end.model_copy(update={"exception": exception}))
        named = bare.classification
        how = (bare.code, bare.signal, bare.stopped_by_us, bare.completed_steps, bare.shown_steps, bare.exception)
        alike[how, named and (named.fault, named.owner, named.reason, named.consequence)].append(bare)
    return sorted([*apart, *map(_together, alike.values())], key=lambda end: end.rank)


def _together(ends: list[RankExit]) -> RankExit:
    """Return one entry for ranks that ended in the same way: that of the rank that ended first."""
    first = min(ends, key=lambda end: (end.time_ns, end.rank))
    return first.model_copy(update={"others": Ranks.of(end.rank for end in ends if end is not first)})


def _bare(end: RankExit) -> RankExit:
    """Return an end without its output, but with its classification."""
    named = end.classification
    short = named and named.model_copy(update={"place": "", "evidence": []})
    return end.model_copy(update={"log_tail": "", "classification": short})
