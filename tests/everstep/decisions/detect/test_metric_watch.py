"""The facts in the reports of a rank: values that are not finite, jumps, and speed."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.detect.metric_watch import JUMP_STEPS, PACE_STEPS, PACES_KNOWN, WINDOW, MetricWatch, Series
from everstep.rank.step_reports import GRAD_NORM, LOSS, StepRecord

S = 10**9
BOTH = LOSS | GRAD_NORM


def series(*values: float, given: bool = True) -> Series:
    watched = Series()
    for step, value in enumerate(values):
        watched.observe(step, value, given=given)
    return watched


def test_a_streak_begins_with_its_first_step_and_ends_with_a_finite_value() -> None:
    watched = series(1.0, math.nan, 1.0, math.inf, -math.inf)
    assert (watched.not_finite, watched.streak, watched.since) == (3, 2, 3)

    watched.observe(5, 0.0, given=True)
    assert (watched.not_finite, watched.streak, watched.since) == (3, 0, -1)


@pytest.mark.parametrize("watched", [series(math.nan, math.nan), series(1.0, math.nan, given=False)])
def test_a_value_that_was_never_finite_or_not_reported_is_not_bad(watched: Series) -> None:
    assert (watched.not_finite, watched.streak, watched.since) == (0, 0, -1)


def test_a_new_generation_has_its_own_counts_and_the_same_past() -> None:
    watched = series(*[1.0] * WINDOW, math.nan)
    watched.begin()
    assert (watched.not_finite, watched.streak, watched.since, watched.typical) == (0, 0, -1, 1.0)

    watched.observe(20, math.nan, given=True)
    assert (watched.streak, watched.since) == (1, 20), "the first report shows that a NaN was restored"


def test_a_jump_lasts_several_steps_and_is_compared_with_earlier_values() -> None:
    watched = series(*[1.0] * WINDOW, *[5.0] * (JUMP_STEPS - 1))
    assert watched.jump_step == -1, "so few values are an outlier, and no jump"

    for step, value in enumerate([5.0, 8.0, 1.0, 9.0], start=WINDOW + JUMP_STEPS - 1):
        watched.observe(step, value, given=True)
    assert (watched.jump_step, watched.jump_steps, watched.jump_ratio) == (WINDOW, JUMP_STEPS + 1, 8.0)


def test_a_jump_that_stays_becomes_the_typical_value() -> None:
    watched = series(*[1.0] * WINDOW, *[6.0] * WINDOW, 7.0)
    assert watched.typical == 6.0
    assert (watched.jump_step, watched.jump_steps) == (WINDOW, WINDOW - 1)


@pytest.mark.parametrize("before", [[1.0] * (WINDOW - 10), [0.0] * WINDOW, [-1.0] * WINDOW])
def test_without_a_past_or_around_zero_nothing_is_a_jump(before: list[float]) -> None:
    assert series(*before, *[100.0] * 10).jump_step == -1


@settings(max_examples=30)
@given(st.lists(st.floats(0.5, 2.0), min_size=WINDOW, max_size=WINDOW + 40))
def test_the_typical_value_is_the_median_of_the_last_ones(values: list[float]) -> None:
    expected = sorted(values[-WINDOW:])[WINDOW // 2]
    assert series(*values).typical == expected >= median(values[-WINDOW:])


def run(watch: MetricWatch, step_s: float, steps: int, *, start: int = 0, at_s: float = 0.0) -> float:
    for step in range(start, start + steps):
        at_s += step_s
        watch.observe(StepRecord(step, int(at_s * S), 1.0, 1.0, 100, BOTH))
    return at_s


def test_speed_is_that_of_the_last_steps() -> None:
    watch = MetricWatch()
    run(watch, 0.5, 2)
    assert (watch.pace.step_s, watch.pace.tokens_per_s, watch.step) == (0.5, 200.0, 1)

    run(watch, 0.25, PACE_STEPS + 1, start=2, at_s=1.0)
    assert (watch.pace.step_s, watch.pace.tokens_per_s) == (0.25, 400.0)


def test_a_decline_is_detected_with_the_step_at_which_it_began() -> None:
    watch = MetricWatch()
    steady = (PACES_KNOWN + 2) * PACE_STEPS
    at_s = run(watch, 0.1, steady)
    assert (watch.pace.slow_since, round(watch.pace.typical_step_s, 6)) == (-1, 0.1)

    at_s = run(watch, 0.2, 2 * PACE_STEPS, start=steady, at_s=at_s)
    assert steady - PACE_STEPS <= watch.pace.slow_since <= steady

    run(watch, 0.1, 2 * PACE_STEPS + 1, start=steady + 2 * PACE_STEPS, at_s=at_s)
    assert watch.pace.slow_since == -1, "the decline is over"


def test_the_time_between_two_generations_is_no_step() -> None:
    watch = MetricWatch()
    at_s = run(watch, 0.1, (PACES_KNOWN + 2) * PACE_STEPS)
    watch.begin()
    assert (watch.step, watch.pace.step_s) == (-1, 0.0)

    run(watch, 0.1, 2 * PACE_STEPS, start=50, at_s=at_s + 3600)
    assert watch.pace.slow_since == -1 and round(watch.pace.step_s, 6) == 0.1
