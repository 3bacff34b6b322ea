"""The policy in words: nothing that decides is left out."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decisions.act.evict.decide import allowed
from everstep.decisions.act.evict.describe import DescribedRule, describe
from everstep.decisions.act.evict.rules import RULES
from everstep.model.eviction import EvictMode
from everstep.model.recovery_policy import RecoveryPolicy

SURE = "sure-machine-fault"


def described(name: str, **policy: Any) -> DescribedRule:
    (rule,) = [rule for rule in describe(RecoveryPolicy(**policy)).rules if rule.name == name]
    return rule


def test_every_rule_is_there_in_its_order() -> None:
    rules = describe(RecoveryPolicy()).rules

    assert [rule.name for rule in rules] == [rule.name for rule in RULES]
    assert [rule.position for rule in rules] == list(range(1, len(RULES) + 1))
    assert {rule.mode for rule in rules} == {EvictMode.ACT}


def test_every_setting_of_evictions_is_a_number_of_a_rule_or_of_the_breaker() -> None:
    policy = describe(RecoveryPolicy())
    told = {number.name for rule in policy.rules for number in rule.numbers if number.default is not None}
    told |= {number.name for number in policy.breaker.numbers}
    settings = {name for name in RecoveryPolicy.model_fields if "evict" in name} - {"evict_mode", "evict_rules"}

    assert told == settings


def test_every_number_has_a_source() -> None:
    policy = describe(RecoveryPolicy())
    numbers = [*policy.breaker.numbers, *(number for rule in policy.rules for number in rule.numbers)]

    assert {number.source for number in numbers} == {"", "ByteRobust, figure 5"}
    assert all(number.says and "(" not in number.says for number in numbers)


def test_values_are_those_of_the_policy() -> None:
    [number] = described("gone-machine", silent_evict_s=7.5).numbers

    assert (number.name, number.value, number.default) == ("silent_evict_s", 7.5, 2.0)


@pytest.mark.parametrize(
    ("policy", "mode", "by"),
    [
        ({}, EvictMode.ACT, ""),
        ({"evict_rules": {SURE: "act"}}, EvictMode.ACT, "evict_rules"),
        ({"evict_rules": {SURE: "shadow"}}, EvictMode.SHADOW, "evict_rules"),
        ({"evict_mode": "approve"}, EvictMode.APPROVE, "evict_mode"),
        ({"evict_mode": "approve", "evict_rules": {SURE: "shadow"}}, EvictMode.SHADOW, "evict_rules"),
        ({"evict_mode": "off", "evict_rules": {SURE: "shadow"}}, EvictMode.OFF, "evict_mode"),
        ({"evict_rules": {SURE: "a word of a later release"}}, EvictMode.APPROVE, "evict_rules"),
    ],
)
def test_modes_and_who_says_so(policy: dict[str, Any], mode: EvictMode, by: str) -> None:
    rule = described(SURE, **policy)

    assert (rule.mode, rule.mode_from) == (mode, by)


def test_how_many_may_leave_without_an_operator() -> None:
    policy = RecoveryPolicy(evict_share=0.5)

    assert describe(policy).breaker.without_operator is None
    assert describe(policy, machines=16).breaker.without_operator == allowed(16, policy) == 8
