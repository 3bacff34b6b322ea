"""Ranks that do what most of their peers do not.

Stages of a pipeline do different things at the same time, so that a rank is compared with those of its own stage (
the paper's dominance is not stated, section 5.1). What most of a stage do, or half of all ranks, is dominant and taken
for healthy; the others are outliers. A stage without a majority has none that can be told: its ranks are undecided.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.decisions.blame.hang.stacks import Signature
from everstep.decisions.blame.hang.verdict import StackGroup
from everstep.model.topology import Topology

STAGE_MAJORITY = 0.5
"""More than this share of a stage's known ranks is a majority."""
JOB_MAJORITY = 0.5
"""The share of all known ranks from which on their activity is dominant in each stage."""
FEWEST_PEERS = 3
"""The number of known ranks in a stage below which there is no reliable majority."""

Doing = tuple[Signature, ...]


@dataclass(frozen=True, slots=True)
class Outliers:
    """The differences between ranks."""

    ranks: tuple[int, ...]
    """Outliers, ascending."""
    undecided: tuple[int, ...]
    """Known, and in a stage without a majority."""
    groups: tuple[StackGroup, ...]
    """The groups of ranks with the same activity, the largest first."""


def find_outliers(doing: Mapping[int, Doing], topology: Topology) -> Outliers:
    """Compare the activity of ranks.

    Args:
        doing: The activity of each known rank.
        topology: The topology, for the peers of each rank.
    """
    numbers: dict[Doing, int] = {}
    at = {rank: numbers.setdefault(what, len(numbers)) for rank, what in sorted(doing.items()) if what}
    stages: dict[int, list[int]] = defaultdict(list)
    for rank in at:
        stages[stage_of(rank, topology)].append(rank)
    counts = Counter(at.values())
    in_job = {number for number, count in counts.items() if count >= JOB_MAJORITY * len(at) and count > 1}
    outliers: list[int] = []
    undecided: list[int] = []
    dominant_pairs: set[tuple[int, int]] = set()
    for stage, ranks in stages.items():
        here = Counter(at[rank] for rank in ranks)
        dominant = _dominant(here, in_job)
        dominant_pairs |= {(stage, number) for number in dominant}
        (outliers if dominant else undecided).extend(rank for rank in ranks if at[rank] not in dominant)
    groups = _groups(at, list(numbers), dominant_pairs, topology)
    return Outliers(tuple(sorted(outliers)), tuple(sorted(undecided)), groups)


def stage_of(rank: int, topology: Topology) -> int:
    """Return the pipeline stage of a rank; 0 if there are no stages."""
    return topology.first_along(rank, [axis for axis in topology.axes if axis != "pp"])


def _dominant(here: Counter[int], in_job: set[int]) -> set[int]:
    """Return the activity that counts as healthy in one stage."""
    total = here.total()
    found = in_job & here.keys()
    number, count = here.most_common(1)[0]
    if total >= FEWEST_PEERS and count > STAGE_MAJORITY * total:
        found = found | {number}
    return found


def _groups(
    at: Mapping[int, int], names: Sequence[Doing], dominant: set[tuple[int, int]], topology: Topology
) -> tuple[StackGroup, ...]:
    ranks: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for rank, number in at.items():
        ranks[number, (stage_of(rank, topology), number) in dominant].append(rank)
    found = [
        StackGroup("; ".join(map(str, names[number])), tuple(sorted(members)), is_dominant)
        for (number, is_dominant), members in ranks.items()
    ]
    return tuple(sorted(found, key=lambda group: (-len(group.ranks), group.ranks)))
