"""A job whose saves stopped is noticed while its steps go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.detect.stale_checkpoints import Saves, judge_saves
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import Anomaly, Symptom

POLICY = CheckpointPolicy(max_unsaved_steps=100, max_unsaved_s=60.0)
S = 10**9
STALE = Saves(
    rank=5,
    machine="m2",
    generation=3,
    completed_steps=250,
    own_step=120,
    own_ns=1000 * S,
    first_step_ns=900 * S,
    now_ns=1095 * S,
)


def judge(*ranks: Saves) -> Anomaly | None:
    return judge_saves(ranks, job="gpt", generation=3, policy=POLICY)


def test_the_rank_that_does_not_save_is_named_with_its_machine() -> None:
    anomaly = judge(STALE, replace(STALE, rank=1, machine="m0", own_step=249, own_ns=1094 * S))

    assert anomaly is not None
    assert anomaly.headline == (
        "rank 5 on m2 goes on and does not save: its newest checkpoint, of step 120, is 130 steps and 95 s old"
    )
    assert (anomaly.id, anomaly.generation, anomaly.symptom) == ("unsaved-gpt-3", 3, Symptom.UNSAVED)
    assert (anomaly.ranks, anomaly.machines, anomaly.seen_ns) == ([5], ["m2"], 1095 * S)


def test_of_several_ranks_the_furthest_behind_is_named_and_all_are_kept() -> None:
    anomaly = judge(replace(STALE, rank=1, machine="m0", own_step=121), STALE)

    assert anomaly is not None
    assert anomaly.headline.startswith("rank 5 on m2 goes on")
    assert anomaly.headline.endswith(" old; likewise rank 1")
    assert (anomaly.ranks, anomaly.machines) == ([1, 5], ["m0", "m2"])


@pytest.mark.parametrize(
    "fine",
    [
        replace(STALE, completed_steps=220),  # 100 steps, not more
        replace(STALE, own_ns=1035 * S),  # 60 s, not more
        replace(STALE, first_step_ns=1040 * S),  # the save is of an earlier generation: time counts from the first step
        replace(STALE, first_step_ns=0),  # nothing is computed yet
        replace(STALE, own_step=-1),  # the script keeps no state with everstep
        replace(STALE, generation=2),  # it was stopped
    ],
)
def test_nothing_is_suspected_without_reason(fine: Saves) -> None:
    assert judge(fine) is None


def test_a_job_without_ranks_yet_is_fine() -> None:
    assert judge() is None


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 200))
def test_both_limits_must_be_passed(steps: int, saved: int, age_s: int) -> None:
    one = replace(STALE, completed_steps=steps, own_step=saved, own_ns=(1095 - age_s) * S, first_step_ns=1)

    assert (judge(one) is not None) == (steps - saved > 100 and age_s > 60)
