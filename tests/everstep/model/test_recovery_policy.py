"""The limits of recovery."""

from __future__ import annotations

from everstep.model.recovery_policy import RecoveryPolicy


def test_a_mode_that_this_release_does_not_know_is_read_and_kept() -> None:
    stored = '{"evict_mode": "later", "evict_rules": {"later-rule": "later"}}'

    policy = RecoveryPolicy.model_validate_json(stored)

    assert policy.model_dump(include={"evict_mode", "evict_rules"}) == {
        "evict_mode": "later",
        "evict_rules": {"later-rule": "later"},
    }
