"""The rule notices ranks that drift apart. Reports of different times do not mislead it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.keep.drift import RECALL_S, DriftRule, RankPosition

S = 10**9


def watch(
    done_at: dict[int, list[float]], *, slots: int = 4, until: float, late_s: float = 0.4, seed: int = 0
) -> list[tuple[float, int]]:
    """Return the rule's results over time: (second, steps apart). Each rank reports every 0.2 s, with a delay.

    Args:
        done_at: Rank → the times at which it completes its steps, seconds; it has saved all its steps but the last.
        slots: The number of slots of each rank.
        until: The end of the observation, seconds.
        late_s: The longest delay of a report, seconds.
        seed: Seed for the delays.
    """
    rule, chance, found = DriftRule(slots), random.Random(seed), []
    known: dict[int, RankPosition] = {}
    coming: list[tuple[float, RankPosition]] = []
    for tick in range(int(until * 10)):
        now = tick / 10
        for rank, times in done_at.items():
            if tick % 2 == rank % 2:
                done = sum(at <= now for at in times)
                heard = now + chance.uniform(0, late_s)
                coming.append((heard, RankPosition(rank, done - 1 if done else -1, done, int(heard * S))))
        for heard, standing in sorted(coming, key=lambda one: one[0]):
            if heard <= now:
                known[standing.rank] = standing
        coming = [one for one in coming if one[0] > now]
        found.append((now, rule.observe(known.values(), int(now * S))))
    return found


def times(step_s: float, *, meets: int = 1, slowest_s: float = 0.0, count: int = 4000) -> list[float]:
    """Return the times at which a rank completes its steps, if ranks wait for each other after every ``meets`` steps.

    Args:
        step_s: The duration of the rank's steps, seconds.
        meets: The number of steps after which ranks wait for each other.
        slowest_s: The duration of the slowest rank's steps, seconds.
        count: The number of steps.
    """
    cycle = meets * max(slowest_s, step_s)
    return [k // meets * cycle + (k % meets + 1) * step_s for k in range(count)]


def test_ranks_that_wait_for_each_other_only_every_25_steps_drift() -> None:
    ranks = {0: times(0.1, meets=25, slowest_s=0.2), 1: times(0.2), 2: times(0.2)}
    found = watch(ranks, until=20)

    first = next(now for now, apart in found if apart)
    assert first < 10, "the drift is noticed before the ranks meet for the second time"
    assert all(apart for now, apart in found if now > first), "the drift is reported as long as it lasts"
    assert 6 <= found[-1][1] <= 13


def test_with_enough_slots_there_is_no_drift() -> None:
    ranks = {0: times(0.1, meets=5, slowest_s=0.15), 1: times(0.15)}

    assert not any(apart for _, apart in watch(ranks, slots=4, until=20))


@settings(max_examples=30)
@given(
    step_s=st.floats(0.003, 3),
    skews=st.lists(st.floats(0, 0.9), min_size=2, max_size=4),
    late_s=st.floats(0, 0.45),
    seed=st.integers(0, 1000),
)
def test_late_reports_of_ranks_in_step_are_no_drift(
    step_s: float, skews: list[float], late_s: float, seed: int
) -> None:
    """Each rank is at most one step from the others."""
    ranks = {rank: [at + skew * step_s for at in times(step_s, count=1500)] for rank, skew in enumerate(skews)}

    assert not any(apart for _, apart in watch(ranks, until=4, late_s=late_s, seed=seed))


def test_a_silent_machine_is_not_behind_and_a_drift_ends_after_a_while() -> None:
    rule = DriftRule(4)
    here = [RankPosition(0, 10, 10, 0), RankPosition(1, 10, 10, 0)]
    for second in range(30):
        moved = RankPosition(0, 10 + second, 10 + second, second * S)
        assert rule.observe([moved, here[1]], second * S) == 0, "no new report of rank 1 came"
    behind = [rule.observe([moved, RankPosition(1, 10, 12, s * S)], s * S) for s in (31, 33)]
    assert behind == [0, 27]
    together = [rule.observe([moved, RankPosition(1, 39, 39, s * S)], s * S) for s in (40, 34 + int(RECALL_S))]
    assert together == [27, 0]


@pytest.mark.parametrize(("shown", "apart"), [(0, 0), (5, 0), (3, 2)])
def test_slots_that_are_missing_or_pinned_hold_no_newest_step(shown: int, apart: int) -> None:
    """The job wants 5 slots. A rank that is 2 steps ahead of another one has overwritten its step if 3 slots are
    left."""
    rule = DriftRule(5)
    for second in range(6):
        ahead = RankPosition(0, 12 + second, 12 + second, second * S, newest_slots=shown)
        behind = RankPosition(1, 9 + second, 9 + second, second * S)
        found = rule.observe([ahead, behind], second * S)
    assert found == apart


@pytest.mark.parametrize("own", [-1, 100])
def test_the_position_of_a_rank_without_a_step_is_its_restored_step(own: int) -> None:
    rule = DriftRule(4)
    for second in range(20):
        ahead = RankPosition(0, 100 + min(second, 1), 100, second * S)
        assert rule.observe([ahead, RankPosition(1, own, -1, second * S)], second * S) == 0
