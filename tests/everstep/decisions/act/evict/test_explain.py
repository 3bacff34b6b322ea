"""Descriptions of evictions.

A policy's description has every rule and number. The description of an incident's answers has each result.
"""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decisions.act.evict.explain import DescribedRule, describe, explained, quiet_rules
from everstep.decisions.act.evict.plan_evictions import allowed
from everstep.decisions.act.evict.rules import RULES
from everstep.model.eviction import BREAKER, EvictAnswer, EvictMode
from everstep.model.recovery_policy import RecoveryPolicy, settings


def answer(**fields: Any) -> EvictAnswer:
    known = {"rule": "gone-machine", "machine": "m1", "yes": True, "why": "it is gone", "reason": "silent-machine"}
    return EvictAnswer(**(known | fields))


@pytest.mark.parametrize(
    ("fields", "evicted", "over", "result"),
    [
        ({"yes": False}, ["m1"], True, "nothing"),
        ({}, ["m1"], True, "it left the job"),
        ({}, ["m1"], False, "it left the job"),
        ({}, [], True, "it stayed in the job"),
        ({}, [], False, "it has not left the job yet"),
        ({"mode": EvictMode.APPROVE}, [], False, "an operator has to approve"),
        ({"mode": EvictMode.APPROVE}, [], True, "it stayed in the job"),
        ({"mode": EvictMode.APPROVE}, ["m1"], True, "it left the job"),
        ({"mode": EvictMode.SHADOW}, ["m1"], True, "noted only: the rule is in shadow mode"),
        ({"rule": BREAKER, "machine": "", "yes": False}, ["m1"], True, "an operator had to approve"),
    ],
)
def test_each_answer_has_its_result(fields: dict[str, Any], evicted: list[str], over: bool, result: str) -> None:
    asked = answer(**fields)
    [explanation] = explained([asked], evicted, over=over)

    assert explanation.result == result
    assert EvictAnswer(**explanation.model_dump(exclude={"result"})) == asked


def test_rules_without_an_answer_and_rules_that_are_off() -> None:
    quiet, off = quiet_rules([answer()], RecoveryPolicy(evict={"rules": {"sure-machine-fault": EvictMode.OFF}}))

    assert off == ["sure-machine-fault"]
    assert {*quiet, *off, "gone-machine"} == {rule.name for rule in RULES}
    assert quiet_rules([], RecoveryPolicy(evict={"mode": EvictMode.OFF})) == (
        ["operator"],
        [rule.name for rule in RULES if rule.name != "operator"],
    )


SURE = "sure-machine-fault"


def described(name: str, **policy: Any) -> DescribedRule:
    (rule,) = [rule for rule in describe(RecoveryPolicy(**policy)).rules if rule.name == name]
    return rule


def test_every_rule_is_described_in_order() -> None:
    rules = describe(RecoveryPolicy()).rules

    assert [rule.name for rule in rules] == [rule.name for rule in RULES]
    assert [rule.position for rule in rules] == list(range(1, len(RULES) + 1))
    assert {rule.mode for rule in rules} == {EvictMode.ACT}


def test_every_setting_of_evictions_is_a_number_of_a_rule_or_of_the_breaker() -> None:
    policy = describe(RecoveryPolicy())
    described = {number.name for rule in policy.rules for number in rule.numbers if number.default is not None}
    described |= {number.name for number in policy.breaker.numbers}

    assert described == {name for name in settings() if "evict" in name} - {"evict.mode", "evict.rules"}


def test_every_number_has_a_source() -> None:
    policy = describe(RecoveryPolicy())
    numbers = [*policy.breaker.numbers, *(number for rule in policy.rules for number in rule.numbers)]

    assert {number.source for number in numbers} == {"", "ByteRobust, figure 5"}
    assert all(number.meaning and "(" not in number.meaning for number in numbers)


def test_values_are_those_of_the_policy() -> None:
    [silence, stop] = described("gone-machine", silence={"evict_s": 7.5}).numbers

    assert (silence.name, silence.value, silence.default) == ("silence.evict_s", 7.5, 2.0)
    assert (stop.name, stop.value, stop.default) == ("stop.evict_s", 15.0, 15.0)


@pytest.mark.parametrize(
    ("policy", "mode", "by"),
    [
        ({}, EvictMode.ACT, ""),
        ({"evict": {"rules": {SURE: "act"}}}, EvictMode.ACT, "evict.rules"),
        ({"evict": {"rules": {SURE: "shadow"}}}, EvictMode.SHADOW, "evict.rules"),
        ({"evict": {"mode": "approve"}}, EvictMode.APPROVE, "evict.mode"),
        ({"evict": {"mode": "approve", "rules": {SURE: "shadow"}}}, EvictMode.SHADOW, "evict.rules"),
        ({"evict": {"mode": "off", "rules": {SURE: "shadow"}}}, EvictMode.OFF, "evict.mode"),
        ({"evict": {"rules": {SURE: "a word of a later release"}}}, EvictMode.APPROVE, "evict.rules"),
    ],
)
def test_each_mode_comes_with_the_setting_that_decides_it(policy: dict[str, Any], mode: EvictMode, by: str) -> None:
    rule = described(SURE, **policy)

    assert (rule.mode, rule.mode_from) == (mode, by)


def test_the_number_of_machines_that_may_leave_without_an_operator() -> None:
    policy = RecoveryPolicy(evict={"share": 0.5})

    assert describe(policy).breaker.without_operator is None
    assert describe(policy, machines=16).breaker.without_operator == allowed(16, policy) == 8
