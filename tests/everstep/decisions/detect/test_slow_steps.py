"""A job whose steps take longer than before is detected after a while; pauses are no decline."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.detect.job_facts import RankFacts, RankPace
from everstep.decisions.detect.metric_watch import PACE_STEPS, PACES_KEPT, PACES_KNOWN, Pace
from everstep.decisions.detect.slow_steps import COMPARISONS, SLOW_STEPS, SlowWatch, is_slower
from everstep.model.incident import Symptom
from tests.everstep.decisions.detect.job_facts import RANK, S, facts, seen

KNOWN = (PACES_KNOWN + 1) * PACE_STEPS
SLOW = RankPace(step_s=0.2, typical_step_s=0.1, slow_since=320, slow_comparisons=COMPARISONS)
WELL = RankPace(step_s=0.1, typical_step_s=0.1)


def ranks(*paces: RankPace | None) -> list[RankFacts]:
    return [replace(RANK, rank=rank, pace=pace) for rank, pace in enumerate(paces)]


def paced(times: Iterable[float], tokens: int = 0) -> Pace:
    """Return the pace of a rank whose steps took these times, seconds."""
    pace, at_ns = Pace(), 0
    for step, seconds in enumerate(times):
        at_ns += round(seconds * S)
        pace.observe(step, at_ns, tokens)
    return pace


def as_facts(pace: Pace) -> RankPace:
    return RankPace(
        pace.step_s,
        pace.typical_step_s,
        pace.slow_since,
        pace.slow_comparisons,
        pace.tokens_per_s,
        pace.typical_tokens_per_s,
    )


def test_a_decline_is_reported_once_it_has_lasted() -> None:
    slow = facts(ranks=ranks(SLOW, replace(SLOW, slow_since=322)), slower_s=120.0, last_step=400)
    told = SLOW_STEPS.find(slow)
    assert told is not None
    assert (told.symptom, told.id, told.machines) == (Symptom.SLOW, "slow-gpt-3-400", [])
    assert told.headline == "steps take 0.2 s since step 320, 0.1 s before"
    assert SLOW_STEPS.find(replace(slow, slower_s=119.9)) is None


@pytest.mark.parametrize(
    "more",
    [
        {"newest": False},
        {"lost": {"m1": [1]}},
        {"quiet_s": 30.0},
        {"policy": facts().spec.policy.changed({"slow.after_s": 0.0})},
        {"ranks": ranks(SLOW, WELL)},
    ],
    ids=["old", "lost", "quiet", "off", "over"],
)
def test_a_decline_is_not_reported_if_it_is_over_or_another_rule_reports(more: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"ranks": ranks(SLOW, SLOW), "slower_s": 500.0}
    assert SLOW_STEPS.find(facts(**usual)) is not None
    assert SLOW_STEPS.find(facts(**(usual | more))) is None
    assert SLOW_STEPS.find(facts(seen(0, signal=9), **usual)) is None


def test_most_ranks_that_report_have_to_be_slower() -> None:
    """In some scripts only one rank reports."""
    for found, is_slow in (((SLOW, None, None), True), ((SLOW, SLOW, WELL), True), ((SLOW, WELL), False), ((), False)):
        watch = SlowWatch()
        for now_s in range(1, 12):
            watch.observe(ranks(*found), now_s * S)
        assert watch.slower_s == (10.0 if is_slow else 0.0)


def test_unwatched_time_does_not_count_and_a_recovery_resets_the_time() -> None:
    watch = SlowWatch()
    watch.observe(ranks(SLOW), 1 * S)
    watch.observe(ranks(SLOW), 1000 * S)
    assert watch.slower_s == 5.0, "the watcher was suspended in between"
    watch.observe(ranks(WELL), 1001 * S)
    assert watch.slower_s == 0.0


def test_a_step_with_more_work_is_not_slow() -> None:
    assert is_slower(replace(SLOW, tokens_per_s=500.0, typical_tokens_per_s=1000.0))
    assert not is_slower(replace(SLOW, tokens_per_s=1000.0, typical_tokens_per_s=1000.0))


def test_a_decline_lasts_until_it_is_the_new_typical_speed() -> None:
    pace = paced([0.1] * KNOWN + [0.2] * (3 * PACE_STEPS))
    assert is_slower(as_facts(pace)) and round(pace.typical_step_s, 6) == 0.1
    pace = paced([0.1] * KNOWN + [0.2] * ((PACES_KEPT - 1) * PACE_STEPS))
    assert is_slower(as_facts(pace))
    pace = paced([0.1] * KNOWN + [0.2] * ((PACES_KEPT + 2) * PACE_STEPS))
    assert not is_slower(as_facts(pace)) and round(pace.typical_step_s, 6) == 0.2


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    every=st.integers(5, 64),
    pause=st.floats(1.0, 1000.0),
    neighbour=st.integers(0, KNOWN + 6 * PACE_STEPS),
    length=st.integers(0, PACE_STEPS // 2),
)
def test_pauses_and_a_short_noisy_neighbour_are_no_decline(
    seed: int, every: int, pause: float, neighbour: int, length: int
) -> None:
    """Pauses and a disturbance are no decline.

    Pauses, as for evaluations, may have any length, and follow at most every fifth step. The disturbance lasts for at
    most half of the steps of a comparison.
    """
    draw, pace, at_ns, looks = random.Random(seed), Pace(), 0, 0
    for step in range(KNOWN + 8 * PACE_STEPS):
        paused, disturbed = step % every == 0, neighbour <= step < neighbour + length
        at_ns += round((draw.uniform(0.9, 1.1) + pause * paused + 2.0 * disturbed) * S)
        pace.observe(step, at_ns, 0)
        if pace.comparisons != looks:
            looks = pace.comparisons
            assert not is_slower(as_facts(pace))
    assert looks >= PACES_KNOWN


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), factor=st.floats(1.5, 10.0))
def test_every_decline_beyond_noise_is_detected_within_three_comparisons(seed: int, factor: float) -> None:
    draw = random.Random(seed)
    steps = range(KNOWN + (COMPARISONS + 1) * PACE_STEPS)
    pace = paced(draw.uniform(0.95, 1.05) * (factor if step >= KNOWN else 1.0) for step in steps)
    assert is_slower(as_facts(pace))
    assert KNOWN - PACE_STEPS <= pace.slow_since <= KNOWN + PACE_STEPS
