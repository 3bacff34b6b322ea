"""Makes the times of ranks for the parts of their steps comparable.

A rank is compared with the ranks of its own pipeline stage, in the same operation, since stages may differ. The times
are compared per amount of work if that is known, since sequences may differ. (ByteRobust, section 5.1, compares stacks
instead.)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from everstep.decisions.blame.hang.outliers import stage_of
from everstep.model.topology import Topology

FEWEST_PEERS = 3
"""In a stage with fewer ranks, no rank counts as slow."""
_COMMUNICATION = re.compile(
    r"comm|reduce|gather|scatter|broadcast|send|recv|p2p|barrier|sync|wait|all_?to_?all|bubble", re.IGNORECASE
)
_FULL_STEP = re.compile(r"^(whole[-_ ])?(train[-_ ])?(step|iteration|iter|total)([-_ ]time)?$", re.IGNORECASE)


class PhaseTime(NamedTuple):
    """The time of one operation of one rank in one step."""

    step: int
    rank: int
    operation: str
    start: float
    """Seconds, on one clock for all rows."""
    duration: float
    """Seconds."""
    work: float | None = None
    """The amount of work, e.g. tokens; None: not known."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The computing time of one rank in one step."""

    seconds: float
    """The duration of all computing operations of the rank."""
    ratio: float
    """The time divided by the peers' time for the same work: 1.2 is a fifth longer."""
    raw_ratio: float
    """The time divided by the peers' time, without regard to the amount of work."""
    begins: float
    """The time at which the first of these operations began, seconds."""


def computes(operation: str) -> bool:
    """Return whether an operation computes: it neither waits for other ranks nor is the full step."""
    return not _COMMUNICATION.search(operation) and not _FULL_STEP.match(operation)


def communicates(operation: str) -> bool:
    """Return whether an operation waits for other ranks."""
    return bool(_COMMUNICATION.search(operation))


def step_times(times: Iterable[PhaseTime], topology: Topology) -> dict[int, dict[int, StepTime]]:
    """Return the computing time of each rank in each step: step → rank → time.

    Ranks of stages with fewer than three ranks are left out, since they have too few peers.
    """
    stages: dict[int, int] = {}
    cells: dict[tuple[int, int, str], dict[int, list[float]]] = defaultdict(dict)
    for timing in times:
        if computes(timing.operation):
            stage = stages.setdefault(timing.rank, stage_of(timing.rank, topology))
            cell = cells[timing.step, stage, timing.operation].setdefault(timing.rank, [0.0, 0.0, timing.start, 0.0])
            cell[0] += timing.duration
            cell[1] += timing.work or 0.0
            cell[2] = min(cell[2], timing.start)
            cell[3] += timing.work is not None
    sums: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0, float("inf")]))
    for (step, _, _), ranks in cells.items():
        if len(ranks) < FEWEST_PEERS:
            continue
        usual = median(cell[0] for cell in ranks.values())
        by_work = _by_work(ranks)
        for rank, cell in ranks.items():
            row = sums[step][rank]
            row[0] += cell[0]
            row[1] += by_work * cell[1] if by_work else usual
            row[2] += usual
            row[3] = min(row[3], cell[2])
    return {
        step: {
            rank: StepTime(row[0], row[0] / row[1], row[0] / row[2], row[3])
            for rank, row in ranks.items()
            if row[1] > 0 and row[2] > 0
        }
        for step, ranks in sums.items()
    }


def _by_work(ranks: Mapping[int, Sequence[float]]) -> float:
    """Return the usual time for one unit of work; 0 if the work of some rank is not known."""
    if any(not cell[3] or cell[1] <= 0 for cell in ranks.values()):
        return 0.0
    return median(cell[0] / cell[1] for cell in ranks.values())


def stage_seconds(times: Iterable[PhaseTime], topology: Topology) -> dict[int, float]:
    """Return stage → the median, over its ranks, of a rank's mean computing time in a step, seconds."""
    sums: dict[int, float] = defaultdict(float)
    steps: dict[int, set[int]] = defaultdict(set)
    for timing in times:
        if computes(timing.operation):
            sums[timing.rank] += timing.duration
            steps[timing.rank].add(timing.step)
    stages: dict[int, list[float]] = defaultdict(list)
    for rank, seconds in sums.items():
        stages[topology.coordinate(rank).pp].append(seconds / len(steps[rank]))
    return {stage: median(values) for stage, values in sorted(stages.items())}
