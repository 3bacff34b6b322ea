"""The cause of a slow job from timings: a machine, by vote; or the job itself, in which case no machine is evicted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from everstep.base.text import listed
from everstep.decisions.blame.hang.verdict import ParallelGroup
from everstep.decisions.blame.slow.timings import PhaseTime, StepTime, communicates, computes, stage_seconds, step_times
from everstep.decisions.blame.slow.vote import Round, SlowLimits, SlowVerdict, vote
from everstep.model.slow import SlowConclusion
from everstep.model.topology import Topology

LEAST_FLAGGED = 0.6
"""A degrader has the flag in this share of the rounds: in three of five."""
HEAVY = 1.1
"""A stage that computes so much longer than the median of the others is heavy."""
CORRELATED = 0.8
"""Forward and backward that are slow in the same steps by this correlation are so by their input."""


@dataclass(frozen=True, slots=True)
class _SlowCase:
    """The inputs of a judgement about a slow job."""

    times: Sequence[PhaseTime]
    steps: Mapping[int, Mapping[int, StepTime]]
    stages: tuple[tuple[int, float], ...]
    rounds: tuple[Round, ...]
    limits: SlowLimits

    @property
    def voted(self) -> list[Mapping[int, StepTime]]:
        """The steps of the rounds."""
        return [self.steps[step] for one in self.rounds for step in one.steps]


def judge_slow(times: Sequence[PhaseTime], topology: Topology, limits: SlowLimits | None = None) -> SlowVerdict:
    """Judge a job by the times that its ranks needed for the parts of their steps."""
    limits = limits or SlowLimits()
    steps = step_times(times, topology)
    rounds = vote(steps, topology, limits)
    case = _SlowCase(times, steps, tuple(stage_seconds(times, topology).items()), rounds, limits)
    if not rounds:
        return SlowVerdict(SlowConclusion.UNKNOWN, _too_little(case), stages=case.stages)
    flags = Counter(one.flagged for one in rounds if one.flagged)
    if flags:
        group, count = flags.most_common(1)[0]
        if count >= LEAST_FLAGGED * len(rounds):
            return _degrader(case, group, count, topology)
    return _of_the_job(case)


def _degrader(case: _SlowCase, group: ParallelGroup, count: int, topology: Topology) -> SlowVerdict:
    """A machine, or a group of them."""
    often = Counter(rank for one in case.rounds for rank in one.outliers if topology.machine(rank) in group.machines)
    ranks = tuple(sorted(rank for rank, found in often.items() if found >= LEAST_FLAGGED * len(case.rounds)))
    ranks = ranks or tuple(sorted(often))
    slowdown = median(one[rank].ratio for one in case.voted for rank in ranks if rank in one)
    slow = Counter(rank for one in case.rounds for rank in one.outliers if topology.machine(rank) not in group.machines)
    others = sorted(rank for rank, found in slow.items() if found >= LEAST_FLAGGED * len(case.rounds))
    beside = f"rank {listed(others)} on other machines is slow in as many rounds: look again once this is gone"
    where = str(group) if group.kind == "machine" else f"the {group}"
    return SlowVerdict(
        SlowConclusion.MACHINE,
        f"{where} has most slow ranks in {count} of {len(case.rounds)} rounds: rank {listed(ranks)} "
        f"compute{'s' * (len(ranks) == 1)} {100 * (slowdown - 1):.0f} % longer than peers at the same work",
        group.machines,
        ranks,
        group,
        count,
        slowdown,
        case.rounds,
        case.stages,
        tuple(filter(None, (beside * bool(others), _waits(ranks, case.times), _heavy(case.stages)))),
    )


def _waits(ranks: Sequence[int], times: Sequence[PhaseTime]) -> str:
    """Who computes longer waits less in communication: the others wait for it."""
    sums: dict[int, float] = defaultdict(float)
    for timing in times:
        if communicates(timing.operation):
            sums[timing.rank] += timing.duration
    own = [sums[rank] for rank in ranks if rank in sums]
    others = [seconds for rank, seconds in sums.items() if rank not in ranks]
    if not own or not others or not (usual := median(others)):
        return ""
    share = fmean(own) / usual
    what = "less than the others, who wait for it" if share < 1 else "more than the others: look at its network too"
    return f"in communication it spends {100 * share:.0f} % of the time that the others do, {what}"


def _heavy(stages: Sequence[tuple[int, float]]) -> str:
    """A stage that has more to do; empty: there is none."""
    if len(stages) < 2:
        return ""
    stage, longest = max(stages, key=lambda one: one[1])
    usual = median(seconds for number, seconds in stages if number != stage)
    if not usual or longest < HEAVY * usual:
        return ""
    return (
        f"all ranks of stage {stage} compute {100 * (longest / usual - 1):.0f} % longer than those of other stages: "
        "the model's layers are not spread evenly"
    )


def _of_the_job(case: _SlowCase) -> SlowVerdict:
    """No machine: what the job itself does unevenly."""
    uneven = [max(one.raw_ratio for one in ranks.values()) for ranks in case.voted if ranks]
    typical = median(uneven) if uneven else 1.0
    heavy = _heavy(case.stages)
    if typical >= case.limits.slow:
        linked = _forward_backward(case.times)
        how = f"; forward and backward are slow together (correlation {linked:.2f})" if linked >= CORRELATED else ""
        told = any(timing.work is not None for timing in case.times)
        conclusion, reason = (
            SlowConclusion.UNEVEN_WORK,
            f"the slowest rank of a step computes {100 * (typical - 1):.0f} % longer than its peers, and "
            + ("takes no longer for the same amount of work" if told else "it is another one in other steps")
            + f"{how}: sequences of uneven length, not a machine",
        )
    elif heavy:
        conclusion, reason = SlowConclusion.HEAVY_STAGE, f"{heavy}: not a machine"
    else:
        percent = 100 * (case.limits.slow - 1)
        conclusion, reason = SlowConclusion.EVEN, f"no rank computes {percent:.0f} % longer than its peers"
    beside = (heavy,) if heavy and conclusion is not SlowConclusion.HEAVY_STAGE else ()
    return SlowVerdict(conclusion, reason, slowdown=typical, rounds=case.rounds, stages=case.stages, evidence=beside)


def _forward_backward(times: Sequence[PhaseTime]) -> float:
    """Return the correlation of forward with backward times over ranks and steps; 0 if it is not known."""
    cells: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for timing in times:
        if computes(timing.operation):
            name = timing.operation.lower()
            if "forward" in name:
                cells[timing.step, timing.rank][0] += timing.duration
            elif "backward" in name:
                cells[timing.step, timing.rank][1] += timing.duration
    pairs = [(a, b) for a, b in cells.values() if a and b]
    if len(pairs) < 3:
        return 0.0
    mean_a, mean_b = fmean(a for a, _ in pairs), fmean(b for _, b in pairs)
    both = sum((a - mean_a) * (b - mean_b) for a, b in pairs)
    alone = sum((a - mean_a) ** 2 for a, _ in pairs) * sum((b - mean_b) ** 2 for _, b in pairs)
    return float(both / alone**0.5) if alone > 0 else 0.0


def _too_little(case: _SlowCase) -> str:
    operations = sorted({timing.operation for timing in case.times})
    if not any(map(computes, operations)):
        return f"no operation computes, only {listed(operations)}: timings of forward or backward are needed"
    if not case.steps:
        return "no stage has three ranks with the same operation in the same step: there is nobody to compare with"
    return f"{len(case.steps)} steps are too few: a vote has {case.limits.rounds} rounds of one step at least"
