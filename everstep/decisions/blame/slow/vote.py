"""Fail-slow voting: in each round the group with most outliers gets a flag; the one with most flags degrades the job
(section 5.1).

Ours are what makes an outlier (a tenth longer than its peers at the same work, in most steps of the round), and that a
machine is the smallest group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from everstep.decisions.blame.hang.verdict import ParallelGroup
from everstep.decisions.blame.slow.timings import StepTime
from everstep.model.slow import SlowConclusion
from everstep.model.topology import Topology


@dataclass(frozen=True, slots=True)
class Round:
    """A round of the vote."""

    steps: tuple[int, ...]

    outliers: tuple[int, ...]
    """Ranks that were slower than their peers."""
    flagged: ParallelGroup | None
    """The group with most of them; None: there are none."""


@dataclass(frozen=True, slots=True)
class SlowVerdict:
    """The cause of a slow job, and the machines that should leave: none, unless a machine is the cause."""

    conclusion: SlowConclusion
    reason: str
    """The conclusion in one sentence."""
    machines: tuple[int, ...] = ()
    """The machines to be evicted."""
    ranks: tuple[int, ...] = ()
    """The slow ranks."""
    group: ParallelGroup | None = None
    """The group that was flagged most often."""
    flags: int = 0
    """The number of rounds with that flag."""
    slowdown: float = 1.0
    """The computing time of the slow ranks divided by that of their peers: 1.25 is a quarter longer."""
    rounds: tuple[Round, ...] = ()
    stages: tuple[tuple[int, float], ...] = ()
    """Pipeline stage and what a rank of it computes in a step, in seconds."""
    evidence: tuple[str, ...] = ()


ROUND_S = 10.0
"""Length of a round (section 5.1)."""
ROUNDS = 5
"""Rounds of a vote (section 5.1)."""
SLOW = 1.1
"""The factor over its peers' time above which a rank is slow."""
MOST_STEPS = 0.75
"""A rank is an outlier of a round if it is slow in this share of its steps; otherwise its work varies."""
MOST_OF_JOB = 0.5
"""Largest share of a job's machines that may be flagged for being slow."""


@dataclass(frozen=True, slots=True)
class SlowLimits:
    """The limits of an analysis."""

    round_s: float = ROUND_S
    rounds: int = ROUNDS
    slow: float = SLOW
    most_of_job: float = MOST_OF_JOB


def vote(steps: Mapping[int, Mapping[int, StepTime]], topology: Topology, limits: SlowLimits) -> tuple[Round, ...]:
    """Return the last rounds, each with its flag; none if there are too few steps."""
    return tuple(_round(part, steps, topology, limits) for part in _in_rounds(steps, limits))


def _in_rounds(steps: Mapping[int, Mapping[int, StepTime]], limits: SlowLimits) -> list[list[int]]:
    """The steps of the last rounds, by when they began; a record that is too short is cut into as many equal parts."""
    begins = {step: min(one.begins for one in ranks.values()) for step, ranks in steps.items() if ranks}
    order = sorted(begins, key=lambda step: begins[step])
    if len(order) < limits.rounds:
        return []
    parts: dict[int, list[int]] = defaultdict(list)
    for step in order:
        parts[int((begins[step] - begins[order[0]]) // limits.round_s)].append(step)
    if len(parts) >= limits.rounds:
        return [parts[number] for number in sorted(parts)[-limits.rounds :]]
    size = len(order) / limits.rounds
    return [order[int(number * size) : int((number + 1) * size)] for number in range(limits.rounds)]


def _round(
    part: Sequence[int], steps: Mapping[int, Mapping[int, StepTime]], topology: Topology, limits: SlowLimits
) -> Round:
    ratios: dict[int, list[float]] = defaultdict(list)
    for step in part:
        for rank, one in steps[step].items():
            ratios[rank].append(one.ratio)
    outliers = tuple(
        sorted(
            rank
            for rank, found in ratios.items()
            if median(found) >= limits.slow and sum(one >= limits.slow for one in found) >= MOST_STEPS * len(found)
        )
    )
    return Round(tuple(part), outliers, most_outliers(outliers, topology, limits))


def most_outliers(outliers: Sequence[int], topology: Topology, limits: SlowLimits) -> ParallelGroup | None:
    """The group with most outliers, each rank on its machines that is none taken off; of several the one with the
    fewest machines, then ranks."""
    candidates: dict[tuple[int, ...], ParallelGroup] = {}
    for rank in outliers:
        machine = topology.machine(rank)
        own = topology.ranks(machine)
        candidates.setdefault(own, ParallelGroup("machine", own, (machine,)))
        for kind in filter(lambda kind: topology.size(kind) > 1, topology.kinds):
            ranks = topology.group(rank, kind)
            machines = tuple(sorted({topology.machine(one) for one in ranks}))
            if len(machines) <= max(1, limits.most_of_job * topology.machines):
                candidates.setdefault(ranks, ParallelGroup(kind, ranks, machines))
    slow = Counter(map(topology.machine, outliers))
    return max(
        candidates.values(),
        key=lambda group: (
            sum(2 * slow[one] - topology.ranks_per_machine for one in group.machines),
            -len(group.machines),
            group.kind == "machine",
            -len(group.ranks),
        ),
        default=None,
    )
