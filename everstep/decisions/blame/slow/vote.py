"""Votes on what slows a job down (ByteRobust, section 5.1).

In each round, the group with the most outliers gets a flag. The group with the most flags slows the job down.
ByteRobust does not define the outliers. Here an outlier computes a tenth longer than its peers at the same work, in
most steps of the round, and the smallest group is a machine.
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
    """The ranks that were slower than their peers."""
    flagged: ParallelGroup | None
    """The group with most outliers; None if there are no outliers."""


@dataclass(frozen=True, slots=True)
class SlowVerdict:
    """The cause of a slow job, and the machines that should leave."""

    conclusion: SlowConclusion
    reason: str
    """The conclusion in one sentence."""
    machines: tuple[int, ...] = ()
    """The machines to be evicted; empty unless the conclusion is MACHINE."""
    ranks: tuple[int, ...] = ()
    """The slow ranks."""
    group: ParallelGroup | None = None
    """The group that was flagged most often."""
    flags: int = 0
    """The number of rounds with that flag."""
    slowdown: float = 1.0
    """The computing time of the slow ranks divided by their peers' computing time: 1.25 is a quarter longer."""
    rounds: tuple[Round, ...] = ()
    stages: tuple[tuple[int, float], ...] = ()
    """Each pipeline stage with the computing time of one of its ranks in a step, seconds."""
    evidence: tuple[str, ...] = ()


ROUND_S = 10.0
"""The duration of a round, seconds (ByteRobust, section 5.1)."""
ROUNDS = 5
"""The number of rounds of a vote (ByteRobust, section 5.1)."""
LEAST_FLAGGED = 0.6
"""A group slows the job down if it has the flag in at least this share of the rounds: in three of five."""
SLOW = 1.1
"""A rank is slow in a step if its time is at least this many times the time of its peers."""
MOST_STEPS = 0.75
"""A rank is an outlier of a round if it is slow in at least this share of its steps; otherwise its work varies."""
MOST_OF_JOB = 0.5
"""The largest share of a job's machines that may get the flag."""


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
    """Return the steps of the last rounds. A record that is too short for them is cut into as many equal parts."""
    begins = {step: min(time.begins for time in ranks.values()) for step, ranks in steps.items() if ranks}
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
        for rank, time in steps[step].items():
            ratios[rank].append(time.ratio)
    outliers = tuple(
        sorted(
            rank
            for rank, own in ratios.items()
            if median(own) >= limits.slow and sum(ratio >= limits.slow for ratio in own) >= MOST_STEPS * len(own)
        )
    )
    return Round(tuple(part), outliers, most_outliers(outliers, topology, limits))


def most_outliers(outliers: Sequence[int], topology: Topology, limits: SlowLimits) -> ParallelGroup | None:
    """Return the group for which the number of outliers minus the number of other ranks on its machines is largest.

    If several groups are equal, the group with the fewest machines counts. If these are equal too, a single machine
    counts before a parallel group, and then the group with the fewest ranks counts.
    """
    candidates: dict[tuple[int, ...], ParallelGroup] = {}
    for rank in outliers:
        machine = topology.machine(rank)
        own = topology.ranks(machine)
        candidates.setdefault(own, ParallelGroup("machine", own, (machine,)))
        for kind in filter(lambda kind: topology.size(kind) > 1, topology.kinds):
            ranks = topology.group(rank, kind)
            machines = tuple(sorted({topology.machine(member) for member in ranks}))
            if len(machines) <= max(1, limits.most_of_job * topology.machines):
                candidates.setdefault(ranks, ParallelGroup(kind, ranks, machines))
    slow = Counter(map(topology.machine, outliers))
    return max(
        candidates.values(),
        key=lambda group: (
            sum(2 * slow[member] - topology.ranks_per_machine for member in group.machines),
            -len(group.machines),
            group.kind == "machine",
            -len(group.ranks),
        ),
        default=None,
    )
