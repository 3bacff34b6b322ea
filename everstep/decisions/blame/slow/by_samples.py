"""The vote on the machine that other machines of a running job wait for, from samples of all ranks.

The paper groups stacks (section 5.1). Here each round counts how often a rank waits for others: in a job whose steps go
on, each sample finds its ranks elsewhere, and only several samples show that some ranks wait less than their peers, who
wait for them. A sample that does not show whether a rank waits counts neither way.

The machine that has the flag in most rounds is evicted only if the CPU time of its ranks agrees (``own_past``): a
healthy machine never leaves because of uneven work of the job, or because of missing data (section 5.1 uses the vote
alone).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from everstep.base.text import listed
from everstep.decisions.blame.hang.outliers import stage_of
from everstep.decisions.blame.hang.rank_samples import RankSample
from everstep.decisions.blame.hang.stacks import LeafKind
from everstep.decisions.blame.slow.by_timings import LEAST_FLAGGED
from everstep.decisions.blame.slow.own_past import Growth, JobGrowth, RankTimes, job_growth, own_past
from everstep.decisions.blame.slow.timings import FEWEST_PEERS
from everstep.decisions.blame.slow.vote import Round, SlowLimits, most_outliers
from everstep.model.finding import Finding, FindingSource, Health, MachineFinding
from everstep.model.slow import SlowConclusion, SlowResult, SlowRound
from everstep.model.topology import Topology

FEWEST_LOOKS = 3
"""The number of samples of a round below which a rank does not count."""
LEAST = 0.2
"""An outlier computes in this share of the samples more than its peers do, at least …"""
ERRORS = 1.5
"""… and in so many standard errors of a share that is known by so few samples."""
WAITS = (LeafKind.COLLECTIVE, LeafKind.P2P, LeafKind.BELOW)


class RankLooks(NamedTuple):
    """The number of samples of one rank in a round."""

    looks: int
    """Samples that show the activity of the rank."""
    computes: int
    """Samples in which the rank does work of its own."""

    @property
    def share(self) -> float:
        """The share of its time in which it does something of its own."""
        return self.computes / self.looks


class RankAtWork(NamedTuple):
    """The activity of one rank in one sample."""

    evidence: RankSample
    sleeps: bool = False
    """The rank's process was waiting, and used no CPU (state S)."""


def waits(seen: RankAtWork) -> bool | None:
    """Whether a rank waits for other ranks; None: the sample does not show that.

    The backward pass waits for others below Python, as DDP's does: a rank that sleeps there waits.
    """
    trainer = seen.evidence.trainer
    if trainer is None or (trainer.leaf.kind is LeafKind.BELOW and not seen.sleeps):
        return None
    return trainer.leaf.kind in WAITS


def counted(looks: Iterable[Mapping[int, RankAtWork]]) -> dict[int, RankLooks]:
    """Count for each rank its samples, and the samples in which it did work of its own."""
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for sample in looks:
        for rank, seen in sample.items():
            if (for_others := waits(seen)) is not None:
                found[rank][0] += 1
                found[rank][1] += not for_others
    return {rank: RankLooks(*counts) for rank, counts in found.items()}


def round_of(seen: Mapping[int, RankLooks], topology: Topology, limits: SlowLimits | None = None) -> Round:
    """The round that these samples make, with its flag.

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
    """Return the excess over the usual share that is not an accident of so few samples."""
    return max(LEAST, ERRORS * math.sqrt(usual * (1 - usual) / looks)) - 1e-9


RANKS_KEPT = 64
MACHINES_KEPT = 64
"""The number of machines of one round that are kept."""
NOBODY = "no machine has the flag in as many as {} of {} rounds"


def slow_round(
    seen: Mapping[int, RankLooks],
    times: Mapping[int, RankTimes],
    topology: Topology,
    *,
    names: Sequence[str],
    number: int,
    looks: int,
) -> SlowRound:
    """Return one round of the vote, for the incident.

    Args:
        seen: The samples.
        times: How long ranks compute, now and before.
        topology: The topology of the job.
        names: The names of its machines, in order.
        number: The number of the round, from 1.
        looks: How often all ranks were sampled.
    """
    found = SlowRound(number=number, looks=looks)
    if not seen:
        return found.model_copy(update={"problem": "nothing was seen of any rank"})
    one, (job, job_why) = round_of(seen, topology), job_growth(times, topology)
    found = found.model_copy(update={"outliers": [*one.outliers[:RANKS_KEPT]], "job": str(job), "job_why": job_why})
    if (group := one.flagged) is None:
        return found
    machines = group.machines[:MACHINES_KEPT]
    pasts = {machine: own_past(times, machine, topology) for machine in machines}
    ranks = [rank for rank in one.outliers if topology.machine(rank) in machines]
    named = names[machines[0]] if group.kind == "machine" else f"the {group.kind} group on "
    return found.model_copy(
        update={
            "flagged": named if group.kind == "machine" else named + listed([names[one] for one in machines], 4),
            "machines": [names[machine] for machine in machines],
            "ranks": ranks[:RANKS_KEPT],
            "longer": {names[machine]: str(past.growth) for machine, past in pasts.items()},
            "why": [f"{names[machine]}: {past.why}" for machine, past in pasts.items()],
        }
    )


def judge_rounds(rounds: Sequence[SlowRound], generation: int) -> SlowResult:
    """Return the verdict from all rounds.

    Args:
        rounds: All rounds, including rounds without an answer: those are votes for no machine.
        generation: The generation of the sampled ranks.
    """
    lines = [line_of(one) for one in rounds]
    known = [one for one in rounds if not one.problem]
    flags = Counter(tuple(one.machines) for one in known if one.machines)
    most, count = flags.most_common(1)[0] if flags else ((), 0)
    found = SlowResult(generation=generation, conclusion=SlowConclusion.UNKNOWN, rounds=len(rounds), evidence=lines)
    if len(known) < LEAST_FLAGGED * len(rounds):
        return found.model_copy(update={"reason": f"{len(rounds) - len(known)} of {len(rounds)} rounds saw nothing"})
    if count < LEAST_FLAGGED * len(rounds):
        return _nobody(found, known)
    voters = [one for one in known if tuple(one.machines) == most]
    often = Counter(rank for vote in voters for rank in vote.ranks)
    ranks = sorted(rank for rank, times in often.items() if times * 2 >= count) or sorted(often)
    found = found.model_copy(update={"suspects": [*most], "ranks": ranks, "flags": count})
    growths = {name: _usual([vote.longer.get(name, Growth.UNKNOWN) for vote in voters]) for name in most}
    sure = [name for name, growth in growths.items() if growth.is_sure]
    said = f"{voters[-1].flagged} has most slow ranks in {count} of {len(rounds)} rounds"
    why = "; ".join(voters[-1].why[:3])
    if sure:
        update = {"conclusion": SlowConclusion.MACHINE, "machines": sure, "reason": f"{said}. {why}"}
        return found.model_copy(update=update)
    of_job = {Growth.ALWAYS, Growth.MORE_WORK}
    if all(growth in of_job for growth in growths.values()):
        reason = f"{said}, and that is the job's own doing. {why}"
        return found.model_copy(update={"conclusion": SlowConclusion.UNEVEN_WORK, "reason": reason})
    reason = f"{said}, and nothing else says that it is slow: nobody is evicted for a vote alone. {why}"
    return found.model_copy(update={"conclusion": SlowConclusion.SUSPECT, "reason": reason})


def _nobody(found: SlowResult, known: Sequence[SlowRound]) -> SlowResult:
    """No machine: what all ranks together show."""
    said = NOBODY.format(round(LEAST_FLAGGED * found.rounds), found.rounds)
    kind = Counter(one.job for one in known).most_common(1)[0][0]
    why = next(one.job_why for one in reversed(known) if one.job == kind)
    conclusions: dict[str, tuple[SlowConclusion, str]] = {
        JobGrowth.STAGE: (SlowConclusion.HEAVY_STAGE, "not a machine"),
        JobGrowth.ALL: (SlowConclusion.ALL_SLOWER, "not one machine: what the job does, or what the machines share"),
        JobGrowth.NONE: (SlowConclusion.WAITING, "the network, storage or what the script waits for"),
    }
    conclusion, meaning = conclusions.get(kind, (SlowConclusion.UNKNOWN, "nothing more is known"))
    return found.model_copy(update={"conclusion": conclusion, "reason": f"{said}; {why}: {meaning}"})


def _usual(growths: Sequence[str]) -> Growth:
    """Return the answer of most rounds; if no answer is the most frequent, nothing is known."""
    most, count = Counter(growths).most_common(1)[0]
    return next((one for one in Growth if one == most and count * 2 > len(growths)), Growth.UNKNOWN)


def line_of(one: SlowRound) -> str:
    """Return one round as text for people."""
    if one.problem:
        return f"round {one.number}: {one.problem}"
    outliers = f", slow ranks: {listed(one.outliers, 8)}" if one.outliers else ""
    return f"round {one.number}, {one.looks} samples: {one.flagged or 'no machine'} has the flag{outliers}"


def findings_of_vote(found: SlowResult) -> list[MachineFinding]:
    """Return a finding about each machine that had the flag most often: faulty only if its ranks' own past agrees."""
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
