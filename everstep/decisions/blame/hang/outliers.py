"""Outliers: ranks that do not do what most of their peers do.

Stages of a pipeline do different things at the same time, so a rank is compared with the ranks of its own stage. An
activity is *dominant* in a stage if most ranks of the stage have it, or if half of all ranks have it. A dominant
activity counts as healthy, and ranks of the stage with another activity are outliers. In a stage without a dominant
activity, all ranks are undecided. (ByteRobust, section 5.1, does not define which stacks are dominant.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.decisions.blame.hang.stacks import Signature
from everstep.decisions.blame.hang.verdict import StackGroup
from everstep.model.topology import Topology

STAGE_MAJORITY = 0.5
"""The activity of more than this share of a stage's known ranks is dominant in the stage."""
JOB_MAJORITY = 0.5
"""The activity of at least this share of all known ranks is dominant in each stage."""
FEWEST_PEERS = 3
"""In a stage with fewer known ranks, no activity is dominant by the majority of the stage."""

Activity = tuple[Signature, ...]
"""The activity of a rank's own process, and those of its busy helpers."""


@dataclass(frozen=True, slots=True)
class Outliers:
    """The result of comparing the activity of ranks."""

    ranks: tuple[int, ...]
    """The outliers, ascending."""
    undecided: tuple[int, ...]
    """The known ranks of stages without a dominant activity, ascending."""
    groups: tuple[StackGroup, ...]
    """The groups of ranks with the same activity, the largest first."""


def find_outliers(activities: Mapping[int, Activity], topology: Topology) -> Outliers:
    """Compare the activity of ranks.

    Args:
        activities: The activity of each known rank.
        topology: The topology of the job.
    """
    numbers: dict[Activity, int] = {}
    number_of = {
        rank: numbers.setdefault(activity, len(numbers)) for rank, activity in sorted(activities.items()) if activity
    }
    stages: dict[int, list[int]] = defaultdict(list)
    for rank in number_of:
        stages[stage_of(rank, topology)].append(rank)
    counts = Counter(number_of.values())
    in_job = {number for number, count in counts.items() if count >= JOB_MAJORITY * len(number_of) and count > 1}
    outliers: list[int] = []
    undecided: list[int] = []
    dominant_pairs: set[tuple[int, int]] = set()
    for stage, ranks in stages.items():
        dominant = _dominant(Counter(number_of[rank] for rank in ranks), in_job)
        dominant_pairs |= {(stage, number) for number in dominant}
        (outliers if dominant else undecided).extend(rank for rank in ranks if number_of[rank] not in dominant)
    groups = _groups(number_of, list(numbers), dominant_pairs, topology)
    return Outliers(tuple(sorted(outliers)), tuple(sorted(undecided)), groups)


def stage_of(rank: int, topology: Topology) -> int:
    """Return the pipeline stage of a rank; 0 if there are no stages."""
    return topology.first_along(rank, [axis for axis in topology.axes if axis != "pp"])


def _dominant(in_stage: Counter[int], in_job: set[int]) -> set[int]:
    """Return the activities that are dominant in a stage, each as its index."""
    total = in_stage.total()
    number, count = in_stage.most_common(1)[0]
    by_stage = {number} if total >= FEWEST_PEERS and count > STAGE_MAJORITY * total else set()
    return (in_job & in_stage.keys()) | by_stage


def _groups(
    number_of: Mapping[int, int],
    activities: Sequence[Activity],
    dominant: set[tuple[int, int]],
    topology: Topology,
) -> tuple[StackGroup, ...]:
    ranks: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for rank, number in number_of.items():
        ranks[number, (stage_of(rank, topology), number) in dominant].append(rank)
    groups = [
        StackGroup("; ".join(map(str, activities[number])), tuple(sorted(members)), is_dominant)
        for (number, is_dominant), members in ranks.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks)))
