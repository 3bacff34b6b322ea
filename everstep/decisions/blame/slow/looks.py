"""One round of the vote in a job that runs: whom the others wait for, by looks at what all ranks do.

The paper groups stacks (section 5.1). Ours goes by how often a rank waits for others: in a job whose steps go on, each
look finds its ranks elsewhere, and only over several looks it shows that some wait less than their peers, who wait for
them. A look that does not show whether a rank waits counts neither way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

from everstep.decisions.blame.hang.evidence import RankEvidence
from everstep.decisions.blame.hang.outliers import stage_of
from everstep.decisions.blame.hang.stacks import LeafKind
from everstep.decisions.blame.slow.timings import FEWEST_PEERS
from everstep.decisions.blame.slow.verdict import Round
from everstep.decisions.blame.slow.vote import SlowLimits, most_outliers
from everstep.model.topology import Topology

FEWEST_LOOKS = 3
"""A rank that was seen less often in a round says nothing in it."""
LEAST = 0.2
"""An outlier computes in this share of the looks more than its peers do, at least …"""
ERRORS = 1.5
"""… and in so many standard errors of a share that is known by so few looks."""
WAITS = (LeafKind.COLLECTIVE, LeafKind.P2P, LeafKind.BELOW)


class RankLooks(NamedTuple):
    """How often one rank was seen in a round."""

    looks: int
    """That show what it does."""
    computes: int
    """In so many of them it does something of its own."""

    @property
    def share(self) -> float:
        """Of its time that it does something of its own."""
        return self.computes / self.looks


class RankAtWork(NamedTuple):
    """One rank in one look."""

    evidence: RankEvidence
    sleeps: bool = False
    """Its process was waiting for something, and used no CPU (state S)."""


def waits(seen: RankAtWork) -> bool | None:
    """Whether a rank waits for others; None: that does not show.

    The backward pass waits for others below Python, as DDP's does: a rank that sleeps there waits.
    """
    trainer = seen.evidence.trainer
    if trainer is None or (trainer.leaf.kind is LeafKind.BELOW and not seen.sleeps):
        return None
    return trainer.leaf.kind in WAITS


def counted(looks: Iterable[Mapping[int, RankAtWork]]) -> dict[int, RankLooks]:
    """How often each rank was seen, and did something of its own."""
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for one in looks:
        for rank, seen in one.items():
            if (for_others := waits(seen)) is not None:
                found[rank][0] += 1
                found[rank][1] += not for_others
    return {rank: RankLooks(*counts) for rank, counts in found.items()}


def round_of(seen: Mapping[int, RankLooks], topology: Topology, limits: SlowLimits | None = None) -> Round:
    """The round that these looks make, with its flag.

    Ranks of a stage of which fewer than three are known have no peers, and are left out.
    """
    stages: dict[int, dict[int, RankLooks]] = defaultdict(dict)
    for rank, one in seen.items():
        if one.looks >= FEWEST_LOOKS:
            stages[stage_of(rank, topology)][rank] = one
    outliers: list[int] = []
    for ranks in stages.values():
        if len(ranks) < FEWEST_PEERS:
            continue
        usual = median(one.share for one in ranks.values())
        outliers += [rank for rank, one in ranks.items() if one.share - usual >= _enough(usual, one.looks)]
    outliers.sort()
    return Round((), tuple(outliers), most_outliers(outliers, topology, limits or SlowLimits()))


def _enough(usual: float, looks: int) -> float:
    """How much more than usual is no accident of so many looks."""
    return max(LEAST, ERRORS * math.sqrt(usual * (1 - usual) / looks)) - 1e-9
