"""The number of steps between two saves that a job's policy allows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from everstep.model.checkpoint_policy import CheckpointPolicy


def policy(**fields: Any) -> CheckpointPolicy:
    return CheckpointPolicy.model_validate(fields)


def test_by_default_a_job_begins_with_a_save_after_every_step_and_continues_as_before() -> None:
    assert policy().save_every_steps == 0
    assert [policy().first_distance(before) for before in (0, 1, 8)] == [1, 1, 8]


def test_a_fixed_number_is_kept() -> None:
    assert policy(save_every_steps=6).first_distance(8) == policy(save_every_steps=6).most_distance == 6


def test_with_two_slots_every_step_is_saved() -> None:
    assert policy(slots=2).first_distance(8) == policy(slots=2).most_distance == 1


@given(st.integers(1, 10_000), st.integers(0, 14).map(lambda power: 1 << power))
def test_a_save_that_is_in_time_never_opens_an_incident(max_unsaved_steps: int, before: int) -> None:
    chosen = policy(max_unsaved_steps=max_unsaved_steps)
    most = chosen.most_distance
    assert most.bit_count() == 1
    assert 2 * most <= max_unsaved_steps or most == 1
    assert 4 * most > max_unsaved_steps
    assert chosen.first_distance(before) <= most


def test_a_fixed_number_that_would_open_incidents_is_refused() -> None:
    assert policy(save_every_steps=50).most_distance == 50
    with pytest.raises(ValidationError, match="save_every_steps = 51 is more than half of max_unsaved_steps = 100"):
        policy(save_every_steps=51)
    assert policy(save_every_steps=51, max_unsaved_steps=102).most_distance == 51


@pytest.mark.parametrize("wrong", [-1, "often", 1.5, None])
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        policy(save_every_steps=wrong)
