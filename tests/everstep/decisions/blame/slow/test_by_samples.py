"""The vote in a running job: which machine it names, and why."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.blame.hang.rank_samples import RankSample
from everstep.decisions.blame.hang.stacks import Leaf, LeafKind, ProcessRole, Signature
from everstep.decisions.blame.slow.by_samples import (
    SampleCounts,
    count_sample,
    judge_rounds,
    round_of,
    slow_round,
)
from everstep.decisions.blame.slow.own_past import CpuPerStep, Growth, JobGrowth, RankTimes, job_growth, own_past
from everstep.model.slow import SlowConclusion, SlowRound
from everstep.model.topology import Topology

DP = Topology.of(4, 2, tp=2)
"""Four machines with two ranks each. Each machine is a tensor parallel group, and machines are data parallel."""
PIPELINE = Topology.of(8, 1, pp=2)
NAMES = [f"m{number}" for number in range(8)]
USUAL = RankTimes(0.4, 0.2, CpuPerStep(0.05, 0.01), CpuPerStep(0.05, 0.01))
"""A rank that computes as long as before, although its steps take twice as long."""
STARVED = replace(USUAL, cpu=CpuPerStep(0.05, 0.21))
BUSY = replace(USUAL, cpu=CpuPerStep(0.25, 0.01))


def times(topology: Topology, other: Mapping[int, RankTimes]) -> dict[int, RankTimes]:
    return {rank: other.get(rank, USUAL) for rank in range(topology.world_size)}


def seen(
    topology: Topology, computes: Mapping[int, float], *, looks: int = 10, usual: float = 0.5
) -> dict[int, SampleCounts]:
    """Return the counts of ``looks`` samples, in which each rank computes in the given share."""
    return {rank: SampleCounts(looks, round(looks * computes.get(rank, usual))) for rank in range(topology.world_size)}


def vote(
    slow: Mapping[int, float], evidence: Mapping[int, RankTimes], topology: Topology = DP, rounds: int = 5
) -> list[SlowRound]:
    looks, past = seen(topology, slow), times(topology, evidence)
    return [slow_round(looks, past, topology, names=NAMES, number=one + 1, looks=10) for one in range(rounds)]


ON_M2 = {4: 1.0, 5: 0.9}


def test_a_machine_is_slow_if_the_vote_and_its_own_past_agree() -> None:
    found = judge_rounds(vote(ON_M2, {4: STARVED, 5: STARVED}), 3)
    assert (found.conclusion, found.machines, found.suspects) == (SlowConclusion.MACHINE, ["m2"], ["m2"])
    assert (found.ranks, found.flags, found.rounds, found.generation) == ([4, 5], 5, 5, 3)
    assert found.reason == (
        "m2 has most slow ranks in 5 of 5 rounds. m2: its ranks compute 200 ms longer in a step, their peers 0 ms; "
        "steps take 200 ms more; for 200 ms of this they get no CPU"
    )
    assert found.evidence[0] == "round 1, 10 samples: m2 has the flag, slow ranks: 4, 5"


@pytest.mark.parametrize(
    ("evidence", "conclusion", "growth"),
    [
        ({4: USUAL, 5: USUAL}, SlowConclusion.SUSPECT, Growth.NOT_LONGER),
        ({4: BUSY, 5: BUSY}, SlowConclusion.SUSPECT, Growth.LONGER),
        ({4: replace(BUSY, work=2.0), 5: replace(BUSY, work=2.0)}, SlowConclusion.UNEVEN_WORK, Growth.MORE_WORK),
        ({4: replace(BUSY, work=1.0), 5: replace(BUSY, work=1.0)}, SlowConclusion.MACHINE, Growth.SLOWER),
        (
            dict.fromkeys((4, 5), replace(USUAL, cpu=CpuPerStep(0.1, 0.01), typical_cpu=CpuPerStep(0.1, 0.01))),
            SlowConclusion.UNEVEN_WORK,
            Growth.ALWAYS,
        ),
        (
            dict.fromkeys((4, 5), replace(USUAL, cpu=CpuPerStep(0.06, 0.01), typical_cpu=CpuPerStep(0.06, 0.01))),
            SlowConclusion.SUSPECT,
            Growth.NOT_LONGER,
        ),
        (dict.fromkeys(range(8), STARVED), SlowConclusion.SUSPECT, Growth.ALL),
        (
            dict.fromkeys(range(8), replace(USUAL, cpu=CpuPerStep(0.12, 0.0)))
            | dict.fromkeys((4, 5), replace(USUAL, cpu=CpuPerStep(0.4, 0.0), typical_cpu=CpuPerStep(0.2, 0.0))),
            SlowConclusion.SUSPECT,
            Growth.ALL,
        ),
        (dict.fromkeys(range(8), replace(USUAL, cpu=None)), SlowConclusion.SUSPECT, Growth.UNKNOWN),
    ],
    ids=["same", "longer", "more-work", "slower", "always", "hardly-more", "all", "in-proportion", "unknown"],
)
def test_the_vote_alone_evicts_no_machine(
    evidence: Mapping[int, RankTimes], conclusion: SlowConclusion, growth: Growth
) -> None:
    rounds = vote(ON_M2, evidence)
    found = judge_rounds(rounds, 1)
    assert (found.conclusion, found.suspects) == (conclusion, ["m2"])
    assert found.machines == (["m2"] if conclusion is SlowConclusion.MACHINE else [])
    assert rounds[0].longer == {"m2": growth}


@pytest.mark.parametrize(
    ("evidence", "conclusion", "topology"),
    [
        ({}, SlowConclusion.WAITING, DP),
        (dict.fromkeys(range(8), BUSY), SlowConclusion.ALL_SLOWER, DP),
        (dict.fromkeys(PIPELINE.group(0, "dp"), BUSY), SlowConclusion.HEAVY_STAGE, PIPELINE),
        (dict.fromkeys(range(8), replace(USUAL, typical_cpu=None)), SlowConclusion.UNKNOWN, DP),
    ],
)
def test_if_no_machine_is_slow_the_times_of_all_ranks_decide(
    evidence: Mapping[int, RankTimes], conclusion: SlowConclusion, topology: Topology
) -> None:
    found = judge_rounds(vote({}, evidence, topology), 1)
    assert (found.conclusion, found.machines, found.suspects) == (conclusion, [], [])


def test_a_heavy_stage_is_compared_with_itself() -> None:
    """All ranks of the heavy stage wait equally long, and shorter than the ranks of the other stage."""
    first = dict.fromkeys(PIPELINE.group(0, "dp"), 1.0)
    assert round_of(seen(PIPELINE, first), PIPELINE).outliers == ()
    slow = PIPELINE.group(0, "dp")[1]
    one = round_of(seen(PIPELINE, dict.fromkeys(PIPELINE.group(0, "dp"), 0.6) | {slow: 1.0}), PIPELINE)
    assert one.flagged is not None and one.flagged.machines == (PIPELINE.machine(slow),)


def test_rounds_without_a_result_are_votes_for_no_machine() -> None:
    named = vote(ON_M2, {4: STARVED, 5: STARVED})
    blind = [SlowRound(number=number, problem="it failed") for number in (1, 2, 3)]
    assert judge_rounds([*blind[:2], *named[2:]], 1).machines == ["m2"], "three of five rounds name m2, which is enough"
    found = judge_rounds([*blind, *named[3:]], 1)
    assert (found.conclusion, found.machines) == (SlowConclusion.UNKNOWN, [])
    assert slow_round({}, {}, DP, names=NAMES, number=1, looks=3).problem


def test_flags_of_several_machines_name_none() -> None:
    """In each round, the ranks of another machine have more work."""
    rounds = [vote({2 * number: 1.0, 2 * number + 1: 1.0}, {}, rounds=1)[0] for number in (0, 1, 2, 3, 0)]
    assert judge_rounds(rounds, 1).suspects == []


def evidence(kind: LeafKind) -> RankSample:
    return RankSample(trainer=Signature(ProcessRole.TRAINER, (("step", "train.py"),), Leaf(kind, "x")))


def test_a_sample_that_does_not_show_whether_a_rank_waits_does_not_count() -> None:
    kinds = [LeafKind.COLLECTIVE, LeafKind.P2P, LeafKind.OTHER, LeafKind.DATA, LeafKind.BELOW]
    counts: dict[int, SampleCounts] = {}
    for kind in kinds:
        count_sample(counts, {0: evidence(kind), 1: RankSample(), 2: replace(evidence(kind), sleeps=True)})
    assert counts == {0: SampleCounts(4, 2), 2: SampleCounts(5, 2)}, "a rank that sleeps in C++ counts as waiting"


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), usual=st.floats(0.2, 0.9), heavy=st.integers(0, 7))
def test_a_healthy_job_loses_no_machine_whatever_its_samples_show(seed: int, usual: float, heavy: int) -> None:
    """One rank always has more work than the others. Its machine gets the flags, but stays in the job."""
    draw = random.Random(seed)

    def share(rank: int) -> float:
        return sum(draw.random() < (0.98 if rank == heavy else usual) for _ in range(10)) / 10

    always = replace(USUAL, cpu=CpuPerStep(0.2, 0.01), typical_cpu=CpuPerStep(0.2, 0.01))
    rounds = [vote({rank: share(rank) for rank in range(8)}, {heavy: always}, rounds=1)[0] for _ in range(5)]
    assert judge_rounds(rounds, 1).machines == []


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), slow=st.integers(0, 3), factor=st.floats(2.0, 4.0))
def test_only_the_slow_machine_may_leave(seed: int, slow: int, factor: float) -> None:
    """Unlike the other ranks, the ranks of the slow machine compute nearly all the time."""
    draw = random.Random(seed)
    own = DP.ranks(slow)

    def share(rank: int) -> float:
        return sum(draw.random() < (0.97 if rank in own else 0.9 / factor) for _ in range(10)) / 10

    past = {rank: replace(STARVED, cpu=CpuPerStep(0.05, 0.01 + 0.2 * (factor - 1))) for rank in own}
    longer = {rank: replace(past.get(rank, USUAL), step_s=0.2 * factor) for rank in range(8)}
    rounds = [vote({rank: share(rank) for rank in range(8)}, longer, rounds=1)[0] for _ in range(5)]
    found = judge_rounds(rounds, 1)
    assert set(found.machines) <= {f"m{slow}"}
    assert sum(one.machines == [f"m{slow}"] for one in rounds) >= 3 or not found.machines


@settings(max_examples=40)
@given(order=st.permutations(range(8)), unit=st.floats(0.01, 100.0))
def test_the_result_depends_on_neither_order_nor_unit(order: list[int], unit: float) -> None:
    def scaled(one: RankTimes) -> RankTimes:
        cpu, before = one.cpu, one.typical_cpu
        assert cpu is not None and before is not None
        return RankTimes(
            one.step_s * unit,
            one.typical_step_s * unit,
            CpuPerStep(cpu.had_s * unit, cpu.waited_s * unit),
            CpuPerStep(before.had_s * unit, before.waited_s * unit),
        )

    found = times(DP, {4: STARVED, 5: STARVED})
    other = {rank: scaled(found[rank]) for rank in order}
    assert [own_past(other, machine, DP).growth for machine in range(4)] == [
        Growth.NOT_LONGER,
        Growth.NOT_LONGER,
        Growth.NO_CPU,
        Growth.NOT_LONGER,
    ]
    assert job_growth(other, DP)[0] is JobGrowth.NONE
