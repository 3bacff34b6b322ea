"""The plan of evictions: modes, the breaker, and laws that hold for any findings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.act.evict.plan_evictions import ASKED_KEPT, EvictPlan, allowed, counts
from everstep.decisions.blame.silence import findings_of_silence
from everstep.model.eviction import BREAKER, Eviction, EvictMode
from everstep.model.finding import FindingSource, Health, MachineFinding, Owner
from everstep.model.recovery_policy import RecoveryPolicy
from tests.everstep.decisions.act.evict.evict_facts import EIGHT, NOW, S, evicted, flap, found, plan, silent

HOUR = 3600 * S
NO_BREAKER = RecoveryPolicy(evict={"share": 1})
"""A policy under which the breaker never trips."""


def lists(decided: EvictPlan) -> tuple[list[str], list[str], list[str]]:
    return (
        [one.machine for one in decided.evict],
        [one.machine for one in decided.ask],
        [one.machine for one in decided.shadow],
    )


def with_rule(mode: EvictMode, name: str = "sure-machine-fault") -> RecoveryPolicy:
    return RecoveryPolicy(evict={"rules": {name: mode}})


def test_each_mode_has_its_list() -> None:
    seen = found("m3"), found("m1")

    assert lists(plan(*seen)) == (["m1", "m3"], [], [])
    assert lists(plan(*seen, policy=with_rule(EvictMode.APPROVE))) == ([], ["m1", "m3"], [])
    assert lists(plan(*seen, policy=with_rule(EvictMode.SHADOW))) == ([], [], ["m1", "m3"])
    off = plan(*seen, policy=with_rule(EvictMode.OFF))
    assert (lists(off), off.asked) == (([], [], []), [])


def test_a_rule_in_shadow_mode_does_not_prevent_an_eviction_by_another_rule() -> None:
    decided = plan(found("m3"), *silent(m3=9.0), policy=with_rule(EvictMode.SHADOW))

    assert evicted(decided) == [("m3", "gone-machine")]
    assert decided.shadow == []
    assert [(answer.rule, answer.yes) for answer in decided.asked] == [
        ("sure-machine-fault", True),
        ("gone-machine", True),
    ]


def test_the_first_rule_that_evicts_is_named() -> None:
    assert evicted(plan(found("m3"), *silent(m3=9.0))) == [("m3", "sure-machine-fault")]


def test_the_breaker_asks_an_operator_about_all_machines() -> None:
    decided = plan(*(found(machine) for machine in EIGHT[:3]))

    assert lists(decided) == ([], ["m0", "m1", "m2"], [])
    assert decided.tripped == (
        "3 machines of 8 would be evicted, 0 were evicted within the last 24 h, and at most 2 may leave without an "
        "operator's approval"
    )
    assert (decided.asked[-1].rule, decided.asked[-1].why) == (BREAKER, decided.tripped)


def test_the_breaker_counts_evictions_within_the_window() -> None:
    recent = NOW - 23 * HOUR, NOW - HOUR
    old = NOW - 24 * HOUR, NOW - 25 * HOUR

    assert plan(found("m3"), evicted_ns=recent).tripped
    assert not plan(found("m3"), evicted_ns=old).tripped
    assert not plan(found("m3"), evicted_ns=recent[:1]).tripped


@pytest.mark.parametrize(
    ("rule", "approved_by", "is_counted"),
    [
        ("sure-machine-fault", "", True),
        ("sure-machine-fault", "ann", False),
        ("gone-machine", "", False),
        ("operator", "", False),
        ("standby-unfit", "", False),
    ],
)
def test_the_breaker_counts_what_rules_decided(rule: str, approved_by: str, is_counted: bool) -> None:
    assert counts(Eviction(machine="m1", rule=rule, reason="x", why="", approved_by=approved_by)) is is_counted


def test_the_breaker_does_not_trip_without_an_eviction() -> None:
    busy = (NOW - HOUR,) * 5

    assert not plan(evicted_ns=busy).tripped
    assert not plan(found("m3"), evicted_ns=busy, policy=with_rule(EvictMode.SHADOW)).tripped


def test_how_many_machines_may_leave_without_an_operator() -> None:
    policy = RecoveryPolicy()
    assert [allowed(machines, policy) for machines in (1, 8, 12, 1200)] == [2, 2, 3, 300]
    assert allowed(100, RecoveryPolicy(evict={"share": 0.29})) == 29
    assert allowed(100, RecoveryPolicy(evict={"share": 0, "at_least": 0})) == 0


def test_of_too_many_answers_those_that_evict_are_kept() -> None:
    doubts = [found("m0", f"doubt-{number:03}", verdict=Health.UNKNOWN) for number in range(2 * ASKED_KEPT)]

    asked = plan(*doubts, *(found(machine) for machine in EIGHT[5:])).asked

    assert len(asked) == ASKED_KEPT
    assert [answer.machine for answer in asked if answer.yes] == ["m5", "m6", "m7"]
    assert asked[-1].rule == BREAKER


def test_a_long_text_is_cut() -> None:
    assert len(plan(found("m0", text="x" * 5000)).asked[0].why) == 300


owners = st.sampled_from(list(Owner))
verdicts = st.sampled_from([Health.FAULTY, Health.UNKNOWN, Health.HEALTHY])
reasons = st.sampled_from(["gpu-lost", "nic-down", "nic-flap", "packet-loss", "bad-line"])
ages = st.integers(0, 700)
machines = st.sampled_from(EIGHT[:4])


def some(
    owner: st.SearchStrategy[Owner] = owners, verdict: st.SearchStrategy[Health] = verdicts
) -> st.SearchStrategy[list[MachineFinding]]:
    one = st.builds(
        lambda machine, reason, ago_s, owner, verdict, sure: found(
            machine, reason, ago_s=ago_s, owner=owner, verdict=verdict, sure=sure
        ),
        machines,
        reasons,
        ages,
        owner,
        verdict,
        st.booleans(),
    )
    return st.lists(one, max_size=8)


@settings(max_examples=40)
@given(some(owner=st.sampled_from([Owner.CODE, Owner.DATA])), some())
def test_a_fault_of_the_job_evicts_no_machine(now: list[MachineFinding], earlier: list[MachineFinding]) -> None:
    decided = plan(*now, earlier=tuple(earlier), policy=NO_BREAKER)

    assert lists(decided) == ([], [], [])


@settings(max_examples=40)
@given(some(verdict=st.sampled_from([Health.UNKNOWN, Health("worn")])), some())
def test_an_unknown_verdict_evicts_no_machine_except_for_network_alerts(
    now: list[MachineFinding], earlier: list[MachineFinding]
) -> None:
    unknown = [seen for seen in now if not (seen.finding.reason == "nic-flap" and seen.finding.owner is Owner.NETWORK)]

    decided = plan(*unknown, earlier=tuple(earlier), policy=NO_BREAKER)

    assert lists(decided) == ([], [], [])


@settings(max_examples=40)
@given(some(), some(), st.sampled_from([EvictMode.SHADOW, EvictMode.OFF, EvictMode.APPROVE]))
def test_no_machine_is_evicted_under_another_mode_than_act(
    now: list[MachineFinding], earlier: list[MachineFinding], ceiling: EvictMode
) -> None:
    policy = NO_BREAKER.changed({"evict.mode": ceiling})
    acted = plan(*now, *silent(m0=60.0), earlier=tuple(earlier), policy=NO_BREAKER)
    restricted = plan(*now, *silent(m0=60.0), earlier=tuple(earlier), policy=policy)

    assert restricted.evict == []
    assert restricted.shadow + restricted.ask == ([] if ceiling is EvictMode.OFF else acted.evict)


@settings(max_examples=40)
@given(some(), some(), st.randoms(use_true_random=False))
def test_the_order_of_findings_does_not_matter(
    now: list[MachineFinding], earlier: list[MachineFinding], order: random.Random
) -> None:
    decided = plan(*now, earlier=tuple(earlier))
    order.shuffle(now)
    order.shuffle(earlier)

    assert plan(*now, earlier=tuple(earlier)) == decided


@settings(max_examples=40)
@given(some(), st.frozensets(machines))
def test_a_machine_is_named_once_and_is_not_evicted_for_silence_while_its_ranks_step(
    now: list[MachineFinding], stepping: frozenset[str]
) -> None:
    gone = findings_of_silence(dict.fromkeys(EIGHT[:4], 60.0), NO_BREAKER, stepping=stepping)
    decided = plan(*now, *gone, policy=NO_BREAKER)
    named = [one.machine for one in decided.evict + decided.ask + decided.shadow]

    assert len(named) == len(set(named))
    assert not {one.machine for one in decided.evict if one.rule == "gone-machine"} & stepping


def test_two_network_alerts_evict_although_the_verdict_of_each_is_unknown() -> None:
    """This is the exception to the law above."""
    assert evicted(plan(flap("m1"), earlier=(flap("m1", ago_s=200),))) == [("m1", "repeated-network-alert")]


def test_neither_a_mode_nor_the_breaker_prevents_an_operators_eviction() -> None:
    request = found("m1", "operator-evict", source=FindingSource.OPERATOR)
    policy = RecoveryPolicy(evict={"mode": EvictMode.SHADOW})
    assert evicted(plan(request, policy=policy)) == [("m1", "operator")]

    many = [found(f"m{number}", f"gpu-lost-{number}") for number in (2, 3, 4)]
    tripped = plan(request, *many, policy=RecoveryPolicy(evict={"at_least": 1, "share": 0.0}))
    assert evicted(tripped) == [("m1", "operator")]
    assert [eviction.machine for eviction in tripped.ask] == ["m2", "m3", "m4"]


def test_the_breaker_does_not_count_evictions_by_operators() -> None:
    requests = [found(f"m{number}", "operator-evict", source=FindingSource.OPERATOR) for number in range(1, 4)]
    assert len(evicted(plan(*requests, policy=RecoveryPolicy(evict={"at_least": 1, "share": 0.0})))) == 3
