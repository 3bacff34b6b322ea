"""Finds the cause of a slow job from recorded timings: a machine or a group of machines, or the job itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from everstep.base.text import listed
from everstep.decisions.blame.hang.verdict import ParallelGroup
from everstep.decisions.blame.slow.timings import PhaseTime, StepTime, communicates, computes, stage_seconds, step_times
from everstep.decisions.blame.slow.vote import LEAST_FLAGGED, Round, SlowLimits, SlowVerdict, vote
from everstep.model.slow import SlowConclusion
from everstep.model.topology import Topology

HEAVY = 1.1
"""A stage is heavy if it computes at least this many times as long as the median of the other stages."""
CORRELATED = 0.8
"""If the times of forward and backward correlate by at least this much, the length of the input determines both."""


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
        """The times of all steps of the rounds."""
        return [self.steps[step] for vote_round in self.rounds for step in vote_round.steps]


def judge_slow(times: Sequence[PhaseTime], topology: Topology, limits: SlowLimits | None = None) -> SlowVerdict:
    """Judge a job by the times that its ranks needed for the parts of their steps."""
    limits = limits or SlowLimits()
    steps = step_times(times, topology)
    rounds = vote(steps, topology, limits)
    case = _SlowCase(times, steps, tuple(stage_seconds(times, topology).items()), rounds, limits)
    if not rounds:
        return SlowVerdict(SlowConclusion.UNKNOWN, _too_little(case), stages=case.stages)
    flags = Counter(vote_round.flagged for vote_round in rounds if vote_round.flagged)
    if flags:
        group, count = flags.most_common(1)[0]
        if count >= LEAST_FLAGGED * len(rounds):
            return _of_group(case, group, count, topology)
    return _of_the_job(case)


def _of_group(case: _SlowCase, group: ParallelGroup, count: int, topology: Topology) -> SlowVerdict:
    """Return the verdict that a machine, or a group of machines, is slow; ``count``: the number of its flags."""
    outlier_in = Counter(rank for vote_round in case.rounds for rank in vote_round.outliers)
    own = {rank: rounds for rank, rounds in outlier_in.items() if topology.machine(rank) in group.machines}
    often = {rank for rank, rounds in outlier_in.items() if rounds >= LEAST_FLAGGED * len(case.rounds)}
    ranks = tuple(sorted(own.keys() & often)) or tuple(sorted(own))
    slowdown = median(times[rank].ratio for times in case.voted for rank in ranks if rank in times)
    others = sorted(often - own.keys())
    beside = f"rank {listed(others)} on other machines is slow in as many rounds: repeat the analysis without this one"
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
    """Describe how long slow ranks spend in communication: less than the others, since the others wait for them."""
    sums: dict[int, float] = defaultdict(float)
    for timing in times:
        if communicates(timing.operation):
            sums[timing.rank] += timing.duration
    own = [sums[rank] for rank in ranks if rank in sums]
    others = [seconds for rank, seconds in sums.items() if rank not in ranks]
    if not own or not others or not (usual := median(others)):
        return ""
    share = fmean(own) / usual
    meaning = "since the others wait for it" if share < 1 else "so its network may be slow too"
    return f"it spends {100 * share:.0f} % as much time in communication as the others do, {meaning}"


def _heavy(stages: Sequence[tuple[int, float]]) -> str:
    """Describe the heavy stage; empty if there is none."""
    if len(stages) < 2:
        return ""
    stage, longest = max(stages, key=lambda numbered: numbered[1])
    usual = median(seconds for number, seconds in stages if number != stage)
    if not usual or longest < HEAVY * usual:
        return ""
    return (
        f"all ranks of stage {stage} compute {100 * (longest / usual - 1):.0f} % longer than those of other stages: "
        "the layers of the model are divided unevenly"
    )


def _of_the_job(case: _SlowCase) -> SlowVerdict:
    """Return the verdict that no machine is slow, with the reason in the job itself."""
    uneven = [max(time.raw_ratio for time in times.values()) for times in case.voted if times]
    typical = median(uneven) if uneven else 1.0
    heavy = _heavy(case.stages)
    if typical >= case.limits.slow:
        linked = _forward_backward(case.times)
        how = f"; forward and backward are slow together (correlation {linked:.2f})" if linked >= CORRELATED else ""
        has_work = any(timing.work is not None for timing in case.times)
        conclusion, reason = (
            SlowConclusion.UNEVEN_WORK,
            f"the slowest rank of a step computes {100 * (typical - 1):.0f} % longer than its peers, "
            + ("but not for the same amount of work" if has_work else "but it is not the same rank in all steps")
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
        return "no stage has three ranks with the same operation in the same step: ranks cannot be compared"
    return f"{len(case.steps)} steps are too few: a vote has {case.limits.rounds} rounds of at least one step each"
