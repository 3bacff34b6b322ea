"""What the rules said, and what followed."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decisions.act.evict.explain import explained, quiet_rules
from everstep.decisions.act.evict.rules import RULES
from everstep.model.eviction import BREAKER, EvictAnswer, EvictMode
from everstep.model.recovery_policy import RecoveryPolicy


def answer(**fields: Any) -> EvictAnswer:
    known = {"rule": "gone-machine", "machine": "m1", "yes": True, "why": "it is gone", "reason": "silent-machine"}
    return EvictAnswer(**(known | fields))


@pytest.mark.parametrize(
    ("given", "evicted", "over", "followed"),
    [
        ({"yes": False}, ["m1"], True, "nothing"),
        ({}, ["m1"], True, "it left the job"),
        ({}, ["m1"], False, "it left the job"),
        ({}, [], True, "it stayed in the job"),
        ({}, [], False, "it has not left the job"),
        ({"mode": EvictMode.APPROVE}, [], False, "it has not left the job: that takes an operator's approval"),
        ({"mode": EvictMode.APPROVE}, [], True, "it stayed in the job"),
        ({"mode": EvictMode.APPROVE}, ["m1"], True, "it left the job"),
        ({"mode": EvictMode.SHADOW}, ["m1"], True, "it was written down, and nothing done"),
        ({"rule": BREAKER, "machine": "", "yes": False}, ["m1"], True, "an operator had to approve"),
    ],
)
def test_what_followed(given: dict[str, Any], evicted: list[str], over: bool, followed: str) -> None:
    asked = answer(**given)
    [told] = explained([asked], evicted, over=over)

    assert told.followed == followed
    assert EvictAnswer(**told.model_dump(exclude={"followed"})) == asked


def test_the_rules_that_said_nothing_and_those_that_were_not_asked() -> None:
    quiet, off = quiet_rules([answer()], RecoveryPolicy(evict_rules={"sure-machine-fault": EvictMode.OFF}))

    assert off == ["sure-machine-fault"]
    assert {*quiet, *off, "gone-machine"} == {rule.name for rule in RULES}
    assert quiet_rules([], RecoveryPolicy(evict_mode=EvictMode.OFF)) == (
        ["operator"],
        [rule.name for rule in RULES if rule.name != "operator"],
    )
