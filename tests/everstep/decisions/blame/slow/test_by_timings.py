"""The verdict from recorded timings: a slow machine, or another cause."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.blame.slow.by_timings import judge_slow
from everstep.decisions.blame.slow.timings import PhaseTime, communicates, computes
from everstep.decisions.blame.slow.vote import SlowLimits
from everstep.model.slow import SlowConclusion
from everstep.model.topology import Topology

TOPOLOGY = Topology.of(8, 2, pp=2)
STEP_S = 2.0


def times(
    factors: dict[int, float] | None = None,
    *,
    stage_1: float = 1.0,
    uneven: float = 0.0,
    steps: int = 30,
    with_work: bool = False,
    topology: Topology = TOPOLOGY,
) -> list[PhaseTime]:
    """Return the times of forward, backward and waiting of each rank. ``factors`` makes ranks slower."""
    draw, found = random.Random(3), []
    for step in range(steps):
        length = {rank: 1 + uneven * draw.random() for rank in range(topology.world_size)}
        took = {}
        for rank in range(topology.world_size):
            own = (factors or {}).get(rank, 1.0) * length[rank] * (stage_1 if topology.coordinate(rank).pp else 1.0)
            took[rank] = own * (1 + 0.02 * draw.random())
        longest = max(took.values())
        for rank, own in took.items():
            begins = step * STEP_S
            work = 1000 * length[rank] if with_work else None
            found += [
                PhaseTime(step, rank, "forward-compute", begins, 0.2 * own, work),
                PhaseTime(step, rank, "backward-compute", begins + 0.5, 0.4 * own, work),
                PhaseTime(step, rank, "grads-reduce-scatter", begins + 1, 0.6 * (longest - own) + 0.05),
                PhaseTime(step, rank, "train_step", begins, 0.6 * longest),
            ]
    return found


def test_a_slow_machine_is_found_by_vote() -> None:
    verdict = judge_slow(times({6: 1.5, 7: 1.5}), TOPOLOGY)

    assert (verdict.conclusion, verdict.machines, verdict.ranks) == (SlowConclusion.MACHINE, (3,), (6, 7))
    assert (verdict.flags, len(verdict.rounds)) == (5, 5)
    assert verdict.slowdown == pytest.approx(1.5, abs=0.05)


def test_another_machine_that_is_as_slow_is_reported() -> None:
    verdict = judge_slow(times({2: 1.5, 3: 1.5, 6: 1.5, 7: 1.5}, topology=Topology.of(8, 2)), Topology.of(8, 2))
    assert (verdict.machines, verdict.flags) == ((1,), 5)
    assert verdict.evidence[0].startswith("rank 6, 7 on other machines")


def test_one_slow_rank_evicts_only_its_machine() -> None:
    verdict = judge_slow(times({9: 1.3}), TOPOLOGY)
    assert (verdict.machines, verdict.ranks) == ((4,), (9,))


def test_a_slow_group_is_over_evicted() -> None:
    """All machines of one pipeline group are slow."""
    topology = Topology(8, 1, (("dp", 4), ("pp", 2)))
    verdict = judge_slow(times({2: 1.4, 3: 1.4}, topology=topology), topology)
    assert verdict.group is not None
    assert (verdict.group.kind, verdict.machines) == ("pp", (2, 3))


def test_a_heavy_stage_is_not_a_machine() -> None:
    verdict = judge_slow(times(stage_1=1.4), TOPOLOGY)
    assert (verdict.conclusion, verdict.machines) == (SlowConclusion.HEAVY_STAGE, ())
    assert "stage 1" in verdict.reason


def test_a_slow_machine_in_a_heavy_stage_is_found_and_the_stage_is_reported() -> None:
    verdict = judge_slow(times({12: 1.4, 13: 1.4}, stage_1=1.4), TOPOLOGY)
    assert verdict.machines == (6,)
    assert any("stage 1" in line for line in verdict.evidence)


@pytest.mark.parametrize("with_work", [False, True])
def test_uneven_sequences_are_not_a_machine(with_work: bool) -> None:
    verdict = judge_slow(times(uneven=1.0, with_work=with_work), TOPOLOGY)
    assert (verdict.conclusion, verdict.machines) == (SlowConclusion.UNEVEN_WORK, ())
    assert ("same amount of work" in verdict.reason) == with_work
    assert "correlation" in verdict.reason


def test_a_rank_that_always_has_more_work_is_not_slow_if_the_work_is_known() -> None:
    rows = [
        one._replace(duration=one.duration * 1.5, work=(one.work or 0) * 1.5)
        if one.rank == 4 and computes(one.operation)
        else one
        for one in times(with_work=True)
    ]
    verdict = judge_slow(rows, TOPOLOGY)
    assert (verdict.conclusion, verdict.machines) == (SlowConclusion.UNEVEN_WORK, ())


def test_a_slow_machine_is_found_among_uneven_sequences_if_the_work_is_known() -> None:
    assert judge_slow(times({4: 1.5, 5: 1.5}, uneven=1.0, with_work=True), TOPOLOGY).machines == (2,)


def test_no_rank_is_slow() -> None:
    verdict = judge_slow(times(), TOPOLOGY)
    assert (verdict.conclusion, verdict.machines, verdict.flags) == (SlowConclusion.EVEN, (), 0)


def test_slow_for_two_rounds_of_five_is_not_enough() -> None:
    slow = times({6: 1.5, 7: 1.5})
    rows = [one if one.step < 10 else other for one, other in zip(slow, times(), strict=True)]
    assert judge_slow(rows, TOPOLOGY).machines == ()


def test_a_short_record_is_cut_into_rounds_unless_it_is_too_short() -> None:
    assert judge_slow(times({6: 1.5, 7: 1.5}, steps=5), TOPOLOGY).machines == (3,)
    verdict = judge_slow(times({6: 1.5, 7: 1.5}, steps=4), TOPOLOGY)
    assert (verdict.conclusion, verdict.machines) == (SlowConclusion.UNKNOWN, ())


def test_rounds_are_of_ten_seconds_and_the_last_five_count() -> None:
    slow = times({6: 1.5, 7: 1.5}, steps=50)
    rows = [one if one.step < 25 else other for one, other in zip(slow, times(steps=50), strict=True)]
    assert judge_slow(rows, TOPOLOGY).conclusion is SlowConclusion.EVEN
    assert judge_slow(rows, TOPOLOGY, SlowLimits(rounds=10)).machines == ()


def test_without_peers_or_operations_nothing_is_known() -> None:
    alone = Topology.of(4, 1, pp=4)
    assert judge_slow(times(topology=alone), alone).conclusion is SlowConclusion.UNKNOWN
    rows = [one for one in times() if not computes(one.operation)]
    assert "no operation computes" in judge_slow(rows, TOPOLOGY).reason
    assert judge_slow([], TOPOLOGY).conclusion is SlowConclusion.UNKNOWN


@pytest.mark.parametrize(
    ("operation", "compute", "communicate"),
    [
        ("forward-compute", True, False),
        ("backward", True, False),
        ("optimizer", True, False),
        ("params-all-gather", False, True),
        ("forward-send", False, True),
        ("grads-sync", False, True),
        ("train_step", False, False),
        ("iteration-time", False, False),
    ],
)
def test_operations(operation: str, compute: bool, communicate: bool) -> None:
    assert (computes(operation), communicates(operation)) == (compute, communicate)


@settings(max_examples=20)
@given(st.integers(0, 7), st.floats(1.2, 4), st.randoms(use_true_random=False))
def test_any_slow_machine_is_found_in_any_order_of_rows(machine: int, factor: float, order: random.Random) -> None:
    rows = times(dict.fromkeys(TOPOLOGY.ranks(machine), factor), steps=5)
    order.shuffle(rows)
    assert judge_slow(rows, TOPOLOGY).machines == (machine,)


def test_a_rank_that_is_slow_in_most_steps_only_has_uneven_work() -> None:
    """The rank is slow in three of five steps, which is too seldom for a slow machine."""
    slow = times({6: 1.5, 7: 1.5})
    rows = [one if one.step % 5 < 2 else other for one, other in zip(times(), slow, strict=True)]
    verdict = judge_slow(rows, TOPOLOGY)
    assert (verdict.conclusion, verdict.machines) == (SlowConclusion.UNEVEN_WORK, ())
