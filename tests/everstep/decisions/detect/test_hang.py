"""Hangs are detected, and a job that works is not taken for a hang."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.hang.progress import HangCheck, HangSign
from everstep.decisions.blame.hang.verdict import HangVerdict
from everstep.decisions.detect.hang import (
    apart_s,
    bound_s,
    find_hang,
    find_stopped_rank,
    first_sample_s,
    hang_seen_s,
    hang_unseen_s,
)
from everstep.decisions.detect.job_facts import JobFacts, RankFacts
from everstep.decisions.detect.lost_machine import find_lost_machine
from everstep.decisions.detect.step_watch import SEEN_WITHIN_S, StepWatch
from everstep.model.hang import HangConclusion, HangMethod
from everstep.model.incident import Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from tests.everstep.decisions.detect.job_facts import RANK, S, facts

BEGUN = replace(RANK, steps=0, stepped=False, steps_since=0)


def ranks(steps: int, *others: RankFacts) -> list[RankFacts]:
    """Return a rank with this number of steps, and the other ranks."""
    return [replace(RANK, steps=steps), *others]


def test_the_time_without_a_step() -> None:
    watch = StepWatch(world_size=1)

    for second in (0, 100):
        watch.observe(ranks(0), second * S)
    assert watch.quiet_s == 0.0, "the time does not count before the first step"
    for step in range(1, 5):
        watch.observe(ranks(8 * step), (100 + step) * S)
    assert (watch.quiet_s, watch.typical_step_s, watch.last_step) == (0.0, 0.125, 32)
    for second in range(105, 116):
        watch.observe(ranks(32), second * S)
    assert watch.quiet_s == 11.0


def test_time_in_which_the_watcher_was_paused_does_not_count() -> None:
    watch = StepWatch(world_size=1)
    for second in range(1, 5):
        watch.observe(ranks(8 * second), second * S)

    watch.observe(ranks(32), 3600 * S)
    assert watch.quiet_s == 5.0, "a gap between two samples counts at most 5 s"
    watch.observe(ranks(40), 3601 * S)
    watch.observe(ranks(40), 100 * S)
    assert watch.quiet_s == 0.0, "the clock was set back, so the time starts again"


def test_if_no_rank_was_shown_the_step_of_the_workflow_counts() -> None:
    watch = StepWatch(world_size=2)
    for second in range(3):
        watch.observe([], second * S, known_step=7)

    assert (watch.quiet_s, watch.last_step) == (2.0, 7)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([BEGUN], False),  # a first step may take long
        ([replace(RANK, rank=1)], True),
        ([replace(RANK, rank=1, alive=False, left_loop=True)], True),
    ],
)
def test_steps_are_expected_once_all_ranks_are_past_their_first(others: list[RankFacts], *, expected: bool) -> None:
    watch = StepWatch(world_size=2)
    first = replace(RANK, steps_since=2)
    for second in range(4):
        watch.observe([first, *others], second * S)

    assert (watch.quiet_s > 0) == expected


def test_a_rank_far_ahead_does_not_wait_for_the_others() -> None:
    watch = StepWatch(world_size=2)
    for second in range(4):
        watch.observe([replace(RANK, steps_since=3), BEGUN], second * S)

    assert watch.quiet_s == 3.0


def test_ranks_that_left_their_loops_are_not_waited_for() -> None:
    watch = StepWatch(world_size=1)
    for second in range(4):
        watch.observe(ranks(9), second * S)
    watch.observe([replace(RANK, steps=9, left_loop=True)], 9 * S)

    assert (watch.quiet_s, watch.typical_step_s) == (0.0, 0.0)


def sampled(
    step_s: float, steps: int, tick_s: float, *, hangs_s: float = 0.0, at_once: int = 1
) -> tuple[StepWatch, float]:
    """Sample a rank that steps and then hangs. Return the watch, and how long the rank has hung.

    Each step consists of ``at_once`` calls of an optimizer.
    """
    watch, now_s = StepWatch(world_size=1), 0.0
    while now_s < step_s * steps + hangs_s:
        done = min(math.floor(now_s / step_s), steps)
        at_ns = round(done * step_s * S)
        watch.observe([replace(RANK, steps=1 + done * at_once, stepped_ns=at_ns)], round(now_s * S))
        now_s += tick_s
    return watch, now_s - tick_s - step_s * steps


@given(
    st.floats(0.05, 5.0),
    st.floats(0.05, 1.0),
    st.floats(2.0, 10.0),
)
def test_the_duration_of_a_step_is_right_however_rarely_the_rank_is_sampled(
    step_s: float, tick_s: float, hangs_s: float
) -> None:
    watch, hung_s = sampled(step_s, 40, tick_s, hangs_s=hangs_s)

    assert step_s * 0.999 <= watch.typical_step_s <= max(step_s * 1.001, SEEN_WITHIN_S + tick_s)
    assert hung_s - tick_s <= watch.quiet_s <= hung_s + 1e-6, "the time without a step is never longer than the hang"
    assert watch.longest_s <= step_s + 2 * tick_s + 1e-6


def test_many_calls_of_an_optimizer_at_once_are_one_step() -> None:
    watch, _ = sampled(10.0, 6, 0.5, at_once=300)

    assert watch.typical_step_s == pytest.approx(10.0)


def test_a_step_that_is_seen_long_after_its_end_does_not_make_a_hang() -> None:
    watch = StepWatch(world_size=1)
    for second in range(1, 5):
        watch.observe([replace(RANK, steps=second, stepped_ns=second * S)], second * S)
    watch.observe([replace(RANK, steps=5, stepped_ns=5 * S)], 3600 * S)

    assert watch.quiet_s == 5.0, "a gap between two samples counts at most 5 s"


def test_a_step_of_a_rank_that_is_behind_ends_the_time_without_a_step() -> None:
    watch = StepWatch(world_size=2)
    ahead = replace(RANK, steps=5, stepped_ns=5 * S)
    watch.observe([ahead, replace(RANK, rank=1, steps=4, stepped_ns=4 * S)], 8 * S)
    watch.observe([ahead, replace(RANK, rank=1, steps=5, stepped_ns=round(8.9 * S))], 9 * S)

    assert watch.quiet_s == pytest.approx(0.1)
    assert watch.typical_step_s == 0.0, "the rank that is ahead made no step, so no step time is known"


def test_a_rank_that_is_shown_for_the_first_time_made_no_step_meanwhile() -> None:
    watch = StepWatch(world_size=2)
    ahead, behind = replace(RANK, steps=20, stepped_ns=2 * S), replace(RANK, rank=1, steps=21, stepped_ns=3 * S)
    watch.observe([ahead], 30 * S)
    watch.observe([ahead, behind], 31 * S)
    watch.observe([ahead, behind], 32 * S)
    assert (watch.longest_s, watch.typical_step_s, watch.quiet_s) == (0.0, 0.0, 1.0)

    watch.observe([ahead, replace(behind, steps=22, stepped_ns=33 * S)], 33 * S)
    assert (watch.longest_s, watch.typical_step_s) == (2.0, 30.0)


def test_a_hang_lasts_longer_than_its_floor_and_many_step_times() -> None:
    for quiet_s, step_s, found in ((5, 0.1, False), (5.1, 0.1, True), (19, 2, False), (21, 2, True)):
        assert (find_hang(facts(quiet_s=quiet_s, typical_step_s=step_s)) is not None) == found
    assert find_hang(facts(quiet_s=600, newest=False)) is None


def test_a_hang_names_machines_whose_agents_do_not_answer() -> None:
    found = find_hang(facts(quiet_s=600, last_step=7, silent=["m1"]))

    assert found is not None
    assert "the agent of m1 does not answer" in found.headline
    assert found.machines == ["m1"]
    assert found.quiet_s == 600


def test_a_lost_machine_is_named_with_its_ranks() -> None:
    found = find_lost_machine(facts(lost={"m1": (2, 3), "m0": (0, 1)}, quiet_s=9))

    assert found is not None
    assert (found.id, found.machines, found.ranks, found.quiet_s) == ("lost-gpt-3", ["m0", "m1"], [0, 1, 2, 3], 9)
    assert find_lost_machine(facts()) is None


DEFAULTS = RecoveryPolicy()
CULPRIT = HangVerdict(HangConclusion.NAMES, HangMethod.WAIT_FOR, "rank 1 on m1: 7 ranks wait for it", (1,), (1,))


def hung(sign: HangSign | None, *, typical_s: float = 0.1, longest_s: float = 0.3, **more: Any) -> JobFacts:
    """Return a job that makes no steps, and the sign that samples of its ranks show. None: there were no samples."""
    check = None if sign is None else HangCheck(sign, CULPRIT)
    fields: dict[str, Any] = {"typical_step_s": typical_s, "longest_step_s": longest_s, "hang_check": check}
    return facts(policy=DEFAULTS, **fields, **more)


@pytest.mark.parametrize(
    ("sign", "typical_s", "longest_s", "expected_s"),
    [
        (None, 0.1, 0.3, 600.0),
        (HangSign.UNKNOWN, 0.1, 0.3, 600.0),
        (HangSign.BUSY, 0.1, 0.3, 600.0),
        (HangSign.QUIET, 0.1, 0.3, 3.0),
        (HangSign.QUIET, 20.0, 25.0, 200.0),
        (HangSign.QUIET, 0.1, 60.0, 90.0),  # a pause of 60 s was seen before
        (HangSign.NEVER, 20.0, 25.0, 20.0),  # a stop that is shorter than a step costs less than a restart
        (HangSign.NEVER, 0.1, 0.3, 0.5),
        (HangSign.OUTSIDE, 0.1, 0.3, 600.0),
        (HangSign.NEVER, 0.0, 0.0, 0.5),
        (HangSign.QUIET, 0.0, 0.0, 600.0),  # no step time is known, so it may be a usual pause
        (HangSign.QUIET, 0.0, 0.4, 600.0),
        (HangSign.COMPUTES, 0.1, 0.3, 3600.0),
        (HangSign.BUSY, 0.1, 500.0, 750.0),  # evaluations of 500 s were seen before
        (HangSign.BUSY, 0.1, 5000.0, 3600.0),
        (HangSign.BUSY, 900.0, 900.0, 9000.0),
    ],
)
def test_the_bound_depends_on_the_samples(
    sign: HangSign | None, typical_s: float, longest_s: float, expected_s: float
) -> None:
    assert bound_s(hung(sign, typical_s=typical_s, longest_s=longest_s)) == expected_s


def test_a_hang_names_its_culprit() -> None:
    assert find_hang(hung(HangSign.QUIET, quiet_s=2.9)) is None
    found = find_hang(hung(HangSign.QUIET, quiet_s=3.1, machine_names=["m0", "m1"], last_step=7))
    assert found is not None
    assert (found.ranks, found.machines) == ([1], ["m1"])
    assert found.headline == "no rank completed a step for 3 s, after step 7: rank 1 on m1: 7 ranks wait for it"


@pytest.mark.parametrize("sign", [HangSign.BUSY, HangSign.COMPUTES, HangSign.UNKNOWN, None])
def test_an_evaluation_of_several_minutes_is_no_hang(sign: HangSign | None) -> None:
    assert find_hang(hung(sign, quiet_s=590.0)) is None


def test_the_first_sample_is_early_enough_for_a_second_one() -> None:
    quick, slow = hung(None), hung(None, typical_s=20.0)
    assert (first_sample_s(quick), first_sample_s(slow)) == (1.5, 189.5)
    assert first_sample_s(hung(None, typical_s=0.0, longest_s=0.0)) == 1.5, "an early sample may show a stopped rank"
    assert first_sample_s(facts(policy=RecoveryPolicy(hang={"trace_s": 0}))) is None


TIMES = st.floats(0.0, 10_000.0)


@given(TIMES, TIMES, st.sampled_from([None, *HangSign]))
def test_the_bounds_are_never_below_their_floors(typical_s: float, longest_s: float, sign: HangSign | None) -> None:
    found = hung(sign, typical_s=typical_s, longest_s=longest_s)
    assert hang_seen_s(found) <= hang_unseen_s(found)
    assert hang_unseen_s(found) >= DEFAULTS.hang.floor_s
    if sign is HangSign.QUIET:
        assert bound_s(found) >= DEFAULTS.hang.idle_floor_s
        assert bound_s(found) > longest_s or bound_s(found) == hang_unseen_s(found)
    elif sign is not HangSign.NEVER:
        assert bound_s(found) >= DEFAULTS.hang.floor_s
    assert 1.0 <= apart_s(typical_s) <= 10.0


OTHER = replace(RANK, rank=1, machine="m1")


def stopped(*, for_s: float = 1.0, quiet_s: float = 1.0, both: bool = False) -> JobFacts:
    since_ns = round((100 - for_s) * S)
    first = replace(RANK, stopped_ns=since_ns if both else 0)
    return facts(ranks=[first, replace(OTHER, stopped_ns=since_ns)], quiet_s=quiet_s)


def test_a_stopped_rank_is_reported_with_its_machine() -> None:
    found = find_stopped_rank(stopped())
    assert found is not None
    assert (found.symptom, found.ranks, found.machines) == (Symptom.HANG, [1], ["m1"])
    assert found.headline == "rank 1 on m1 is stopped (state T), and no rank completed a step for 1.0 s"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (stopped(for_s=0.2), "it was stopped only a moment ago, e.g. by a debugger"),
        (stopped(quiet_s=0.2), "other ranks step"),
        (stopped(both=True), "all ranks are stopped, on purpose"),
        (facts(ranks=[RANK, OTHER], quiet_s=9), "no rank is stopped"),
        (
            facts(ranks=[replace(RANK, stopped_ns=round(99.8 * S)), replace(OTHER, stopped_ns=99 * S)], quiet_s=9),
            "all ranks are stopped, one after the other",
        ),
        (
            facts(ranks=[replace(RANK, continued_ns=round(99.5 * S)), replace(OTHER, stopped_ns=50 * S)], quiet_s=50),
            "all ranks are continued, one after the other",
        ),
        (replace(stopped(), newest=False), "it is of an earlier generation"),
        (replace(stopped(), typical_step_s=2.0), "a step takes longer"),
    ],
)
def test_a_stopped_rank_is_not_reported(found: JobFacts, why: str) -> None:
    assert find_stopped_rank(found) is None, why


def test_a_rank_that_stays_stopped_after_the_others_were_continued_is_reported() -> None:
    found = find_stopped_rank(
        facts(ranks=[replace(RANK, continued_ns=97 * S), replace(OTHER, stopped_ns=50 * S)], quiet_s=50)
    )
    assert found is not None and found.ranks == [1]
