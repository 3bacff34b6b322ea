"""Votes, from samples of all ranks, on the machine that slows a running job down.

ByteRobust groups stacks (section 5.1). But in a job that makes steps, each sample finds the ranks at different places.
So here each round counts how often a rank waits for others. The ranks of a slow machine wait less than their peers,
since the peers wait for them. A sample that does not show whether a rank waits does not count.

The machine that has the flag in most rounds is evicted only if the CPU time of its ranks confirms it (``own_past``). So
a healthy machine does not leave because the job's work is uneven, or because data is missing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from statistics import median
from typing import NamedTuple

from everstep.base.text import listed
from everstep.decisions.blame.hang.outliers import stage_of
from everstep.decisions.blame.hang.rank_samples import RankSample
from everstep.decisions.blame.hang.stacks import LeafKind
from everstep.decisions.blame.slow.own_past import Growth, JobGrowth, RankTimes, job_growth, own_past
from everstep.decisions.blame.slow.timings import FEWEST_PEERS
from everstep.decisions.blame.slow.vote import LEAST_FLAGGED, Round, SlowLimits, most_outliers
from everstep.model.finding import Finding, FindingSource, Health, MachineFinding
from everstep.model.slow import SlowConclusion, SlowResult, SlowRound
from everstep.model.topology import Topology

FEWEST_SAMPLES = 3
"""A rank with fewer samples in a round does not count in this round."""
LEAST = 0.2
"""An outlier computes in a share of its samples that exceeds the usual share by at least this much."""
ERRORS = 1.5
"""The share of an outlier also exceeds the usual share by at least this many standard errors, since a share that is
estimated from few samples is not exact."""
WAITS = (LeafKind.COLLECTIVE, LeafKind.P2P, LeafKind.BELOW)


class SampleCounts(NamedTuple):
    """The numbers of samples of one rank in a round."""

    samples: int
    """The samples that show whether the rank waits."""
    computes: int
    """The samples in which the rank does work of its own."""

    @property
    def share(self) -> float:
        """The share of samples in which the rank does work of its own."""
        return self.computes / self.samples


def waits(sample: RankSample) -> bool | None:
    """Return whether a rank waits for other ranks; None if the sample does not show it.

    The backward pass, for example DDP's, runs in C++ that may compute or wait. If a rank sleeps there, it waits.
    """
    trainer = sample.trainer
    if trainer is None or (trainer.leaf.kind is LeafKind.BELOW and not sample.sleeps):
        return None
    return trainer.leaf.kind in WAITS


def count_sample(counts: MutableMapping[int, SampleCounts], ranks: Mapping[int, RankSample]) -> None:
    """Add a sample to the counts of a round.

    Args:
        counts: The counts of each rank so far.
        ranks: What the sample shows of each rank.
    """
    for rank, sample in ranks.items():
        if (for_others := waits(sample)) is not None:
            samples, computes = counts.get(rank, (0, 0))
            counts[rank] = SampleCounts(samples + 1, computes + (not for_others))


def round_of(counts: Mapping[int, SampleCounts], topology: Topology) -> Round:
    """Return the round that these samples make, with its flag.

    Stages of which fewer than three ranks are known are left out, since their ranks have too few peers.
    """
    stages: dict[int, dict[int, SampleCounts]] = defaultdict(dict)
    for rank, of_rank in counts.items():
        if of_rank.samples >= FEWEST_SAMPLES:
            stages[stage_of(rank, topology)][rank] = of_rank
    outliers: list[int] = []
    for ranks in stages.values():
        if len(ranks) < FEWEST_PEERS:
            continue
        usual = median(of_rank.share for of_rank in ranks.values())
        outliers += [rank for rank, own in ranks.items() if own.share - usual >= _least_excess(usual, own.samples)]
    outliers.sort()
    return Round((), tuple(outliers), most_outliers(outliers, topology, SlowLimits()))


def _least_excess(usual: float, samples: int) -> float:
    """Return the least excess over the usual share that makes a rank an outlier. Chance alone hardly reaches it."""
    return max(LEAST, ERRORS * math.sqrt(usual * (1 - usual) / samples)) - 1e-9


RANKS_KEPT = 64
MACHINES_KEPT = 64
"""Largest numbers of ranks and machines that a round keeps."""


def slow_round(
    counts: Mapping[int, SampleCounts],
    times: Mapping[int, RankTimes],
    topology: Topology,
    *,
    names: Sequence[str],
    number: int,
    looks: int,
) -> SlowRound:
    """Return one round of the vote in the form that an incident keeps.

    Args:
        counts: The samples of each rank.
        times: The times of each rank for a step, now and before the decline.
        topology: The topology of the job.
        names: The names of the job's machines, in order.
        number: The number of the round, from 1.
        looks: How often all ranks were sampled.
    """
    kept = SlowRound(number=number, looks=looks)
    if not counts:
        return kept.model_copy(update={"problem": "no sample shows what any rank does"})
    voted, (job, job_why) = round_of(counts, topology), job_growth(times, topology)
    kept = kept.model_copy(update={"outliers": [*voted.outliers[:RANKS_KEPT]], "job": str(job), "job_why": job_why})
    if (group := voted.flagged) is None:
        return kept
    machines = group.machines[:MACHINES_KEPT]
    pasts = {machine: own_past(times, machine, topology) for machine in machines}
    ranks = [rank for rank in voted.outliers if topology.machine(rank) in machines]
    shown = listed([names[machine] for machine in machines], 4)
    return kept.model_copy(
        update={
            "flagged": shown if group.kind == "machine" else f"the {group.kind} group on {shown}",
            "machines": [names[machine] for machine in machines],
            "ranks": ranks[:RANKS_KEPT],
            "longer": {names[machine]: str(past.growth) for machine, past in pasts.items()},
            "why": [f"{names[machine]}: {past.why}" for machine, past in pasts.items()],
        }
    )


def judge_rounds(rounds: Sequence[SlowRound], generation: int) -> SlowResult:
    """Return the verdict from all rounds.

    Args:
        rounds: All rounds. A round with a problem is a vote for no machine.
        generation: The generation of the sampled ranks.
    """
    lines = [line_of(kept) for kept in rounds]
    known = [kept for kept in rounds if not kept.problem]
    flags = Counter(tuple(kept.machines) for kept in known if kept.machines)
    most, count = flags.most_common(1)[0] if flags else ((), 0)
    found = SlowResult(generation=generation, conclusion=SlowConclusion.UNKNOWN, rounds=len(rounds), evidence=lines)
    if len(known) < LEAST_FLAGGED * len(rounds):
        return found.model_copy(update={"reason": f"{len(rounds) - len(known)} of {len(rounds)} rounds show nothing"})
    if count < LEAST_FLAGGED * len(rounds):
        return _without_machine(found, known)
    voters = [kept for kept in known if tuple(kept.machines) == most]
    often = Counter(rank for voter in voters for rank in voter.ranks)
    ranks = sorted(rank for rank, times in often.items() if times * 2 >= count) or sorted(often)
    found = found.model_copy(update={"suspects": [*most], "ranks": ranks, "flags": count})
    growths = {name: _usual([voter.longer.get(name, Growth.UNKNOWN) for voter in voters]) for name in most}
    sure = [name for name, growth in growths.items() if growth.is_sure]
    flagged = f"{voters[-1].flagged} has most slow ranks in {count} of {len(rounds)} rounds"
    why = "; ".join(voters[-1].why[:3])
    if sure:
        update = {"conclusion": SlowConclusion.MACHINE, "machines": sure, "reason": f"{flagged}. {why}"}
        return found.model_copy(update=update)
    if all(growth in {Growth.ALWAYS, Growth.MORE_WORK} for growth in growths.values()):
        reason = f"{flagged}, because of the job's own work. {why}"
        return found.model_copy(update={"conclusion": SlowConclusion.UNEVEN_WORK, "reason": reason})
    reason = f"{flagged}, and nothing else shows that it is slow: no machine is evicted for a vote alone. {why}"
    return found.model_copy(update={"conclusion": SlowConclusion.SUSPECT, "reason": reason})


def _without_machine(found: SlowResult, known: Sequence[SlowRound]) -> SlowResult:
    """Return the verdict if no machine has enough flags, from the CPU times of all ranks."""
    needed = round(LEAST_FLAGGED * found.rounds)
    kind = Counter(kept.job for kept in known).most_common(1)[0][0]
    why = next(kept.job_why for kept in reversed(known) if kept.job == kind)
    conclusions: dict[str, tuple[SlowConclusion, str]] = {
        JobGrowth.STAGE: (SlowConclusion.HEAVY_STAGE, "not a machine"),
        JobGrowth.ALL: (SlowConclusion.ALL_SLOWER, "not one machine, but the job or something that all machines share"),
        JobGrowth.NONE: (SlowConclusion.WAITING, "the network, storage, or another service that the script waits for"),
    }
    conclusion, meaning = conclusions.get(kind, (SlowConclusion.UNKNOWN, "nothing more is known"))
    reason = f"no machine has the flag in as many as {needed} of {found.rounds} rounds; {why}: {meaning}"
    return found.model_copy(update={"conclusion": conclusion, "reason": reason})


def _usual(growths: Sequence[str]) -> Growth:
    """Return the growth in more than half of the rounds; UNKNOWN if there is none."""
    most, count = Counter(growths).most_common(1)[0]
    return next((growth for growth in Growth if growth == most and count * 2 > len(growths)), Growth.UNKNOWN)


def line_of(kept: SlowRound) -> str:
    """Return one round as text for people."""
    if kept.problem:
        return f"round {kept.number}: {kept.problem}"
    outliers = f", slow ranks: {listed(kept.outliers, 8)}" if kept.outliers else ""
    return f"round {kept.number}, {kept.looks} samples: {kept.flagged or 'no machine'} has the flag{outliers}"


def findings_of_vote(found: SlowResult) -> list[MachineFinding]:
    """Return a finding about each machine with the most flags; it is faulty only if its own past confirms the vote."""
    return [
        MachineFinding(
            machine=machine,
            finding=Finding(
                inspection=FindingSource.VOTE,
                source=FindingSource.VOTE,
                reason="slow",
                verdict=Health.FAULTY if machine in found.machines else Health.UNKNOWN,
                text=f"the job became slow: {found.reason}",
            ),
        )
        for machine in found.suspects
    ]
