"""The settings of a recovery policy."""

from __future__ import annotations

from everstep.model.recovery_policy import RecoveryPolicy


def test_a_changed_policy_keeps_what_was_set_before() -> None:
    policy = RecoveryPolicy(hang={"floor_s": 5.0}, nan={"loss_steps": 0}).changed({"hang.floor_s": 7, "evict.share": 1})

    assert (policy.hang.floor_s, policy.nan.loss_steps, policy.evict.share) == (7.0, 0, 1.0)
    assert policy.chosen() == {"hang.floor_s", "nan.loss_steps", "evict.share"}
    assert policy.value("hang.floor_s") == 7.0


def test_a_mode_that_this_release_does_not_know_is_read_and_kept() -> None:
    stored = (
        '{"evict": {"mode": "later", "rules": {"later-rule": "later"}, "later_setting": 3}, "later": {"setting": 1}}'
    )

    policy = RecoveryPolicy.model_validate_json(stored)

    assert (policy.evict.mode, policy.evict.rules) == ("later", {"later-rule": "later"})
    kept = policy.model_dump()
    assert (kept["evict"]["later_setting"], kept["later"]) == (3, {"setting": 1})
