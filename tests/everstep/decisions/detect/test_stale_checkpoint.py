"""A job that steps without saving is detected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.detect.job_facts import RankFacts
from everstep.decisions.detect.stale_checkpoint import find_stale_checkpoint
from everstep.model.incident import Anomaly, Symptom
from tests.everstep.decisions.detect.job_facts import RANK, S, facts

STALE = replace(
    RANK,
    rank=5,
    machine="m2",
    completed_steps=250,
    saved_step=120,
    saved_ns=1000 * S,
    first_step_ns=900 * S,
    heard_ns=1095 * S,
)


def judge(*ranks: RankFacts) -> Anomaly | None:
    return find_stale_checkpoint(facts(ranks=ranks))


def test_the_rank_that_does_not_save_is_named_with_its_machine() -> None:
    anomaly = judge(STALE, replace(STALE, rank=1, machine="m0", saved_step=249, saved_ns=1094 * S))

    assert anomaly is not None
    assert anomaly.headline == (
        "rank 5 on m2 steps and does not save: its newest checkpoint, of step 120, is 130 steps and 95 s old"
    )
    assert (anomaly.id, anomaly.generation, anomaly.symptom) == ("unsaved-gpt-3", 3, Symptom.UNSAVED)
    assert (anomaly.ranks, anomaly.machines, anomaly.seen_ns) == ([5], ["m2"], 1095 * S)


def test_of_several_ranks_the_furthest_behind_is_named_and_all_are_kept() -> None:
    anomaly = judge(replace(STALE, rank=1, machine="m0", saved_step=121), STALE)

    assert anomaly is not None
    assert anomaly.headline.startswith("rank 5 on m2 steps")
    assert anomaly.headline.endswith(" old; likewise rank 1")
    assert (anomaly.ranks, anomaly.machines) == ([1, 5], ["m0", "m2"])


def test_of_thousands_of_ranks_a_few_are_named() -> None:
    anomaly = judge(*(replace(STALE, rank=rank) for rank in range(8000)))

    assert anomaly is not None
    assert anomaly.headline.endswith("likewise rank 1, 2, 3, 4, 5, 6, 7, 8 and 7991 more")


@pytest.mark.parametrize(
    "fine",
    [
        replace(STALE, completed_steps=220),  # exactly 100 steps are allowed
        replace(STALE, saved_ns=1035 * S),  # exactly 60 s are allowed
        replace(STALE, first_step_ns=1040 * S),  # for a save of an earlier generation, time counts from the first step
        replace(STALE, first_step_ns=0),  # nothing is computed yet
        replace(STALE, saved_step=-1),  # the script keeps no state with everstep
        replace(STALE, saved_step=None),  # the agent does not report its saves
        replace(STALE, alive=False),  # the rank was stopped
    ],
)
def test_a_rank_without_missing_saves_is_not_reported(fine: RankFacts) -> None:
    assert judge(fine) is None


def test_a_job_without_ranks_yet_is_fine() -> None:
    assert judge() is None


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 200))
def test_both_limits_must_be_passed(steps: int, saved: int, age_s: int) -> None:
    rank = replace(STALE, completed_steps=steps, saved_step=saved, saved_ns=(1095 - age_s) * S, first_step_ns=1)

    assert (judge(rank) is not None) == (steps - saved > 100 and age_s > 60)
