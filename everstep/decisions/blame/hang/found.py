"""A verdict over a hang as an incident keeps it: with names of machines, and bounded."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.decisions.blame.hang.verdict import HangVerdict, names_of
from everstep.model.hang import HangFound
from everstep.model.topology import Topology

RANKS_KEPT = 64
MACHINES_KEPT = 1024
LINES_KEPT = 12
PICTURE_CHARACTERS = 6000
REASON_CHARACTERS = 600
"""Of one verdict."""


def found_of(
    verdict: HangVerdict, topology: Topology, names: Sequence[str], *, generation: int, looks: int, seconds: float
) -> HangFound:
    """The verdict for people and for the rules of eviction.

    Args:
        verdict: Of the analysis.
        topology: Of the job.
        names: Of its machines, in order.
        generation: That was looked at.
        looks: How many looks there were.
        seconds: How long they took.
    """
    suspects = sorted({topology.machine(rank) for rank in verdict.ranks} & set(verdict.machines))
    return HangFound(
        generation=generation,
        conclusion=verdict.conclusion,
        method=verdict.method,
        reason=_cut(verdict.reason, REASON_CHARACTERS),
        ranks=list(verdict.ranks[:RANKS_KEPT]),
        machines=list(names_of(verdict.machines[:MACHINES_KEPT], names)),
        suspects=list(names_of(suspects, names)),
        innocent=verdict.innocent,
        evidence=[_cut(line, REASON_CHARACTERS) for line in verdict.evidence[:LINES_KEPT]],
        picture=_cut(verdict.picture, PICTURE_CHARACTERS),
        unknown=len(verdict.unknown),
        looks=looks,
        seconds=round(seconds, 3),
    )


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 2] + " …"
