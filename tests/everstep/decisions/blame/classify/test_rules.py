"""Each rule is the first rule that matches its own examples, and it does not match similar lines."""

from __future__ import annotations

from collections import Counter

import pytest

from everstep.decisions.blame.classify.rule import LogRule, Role
from everstep.decisions.blame.classify.rules import LOG_RULES, LineMatcher
from everstep.decisions.blame.classify.scan import triggered_lines
from everstep.model.finding import Owner

EACH = pytest.mark.parametrize("rule", LOG_RULES, ids=lambda rule: rule.name)


@EACH
def test_a_rule_is_the_first_that_matches_its_examples(rule: LogRule) -> None:
    assert rule.matches
    assert [LineMatcher().rule_of(line) for line in rule.matches] == [rule] * len(rule.matches)


@EACH
def test_a_rule_does_not_match_similar_lines(rule: LogRule) -> None:
    assert rule.misses
    assert [line for line in rule.misses if rule.is_in(line)] == []


@EACH
def test_every_example_has_a_trigger(rule: LogRule) -> None:
    assert [line for line in rule.matches if not triggered_lines(line.lower().encode())] == []
    assert rule.hints == rule.hints.lower()


def test_names_are_unique_and_the_owner_of_a_consequence_is_unknown_or_the_network() -> None:
    assert [name for name, count in Counter(rule.name for rule in LOG_RULES).items() if count > 1] == []
    assert {rule.owner for rule in LOG_RULES if rule.role > Role.CAUSE} <= {Owner.UNKNOWN, Owner.NETWORK}


def test_a_remembered_shape_keeps_the_numbers_that_decide() -> None:
    matcher = LineMatcher()
    lines = [
        "NVRM: Xid (PCI:0000:05:00): 79, pid=1",
        "NVRM: Xid (PCI:0000:05:00): 48, pid=1",
        "NVRM: Xid (PCI:0000:05:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6 0x00000000)",
        "NVRM: Xid (PCI:0000:05:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x004001c6 0x00000000)",
        "OSError: [Errno 28] x",
        "OSError: [Errno 98] x",
    ]
    names = [rule.name for line in lines if (rule := matcher.rule_of(line))]

    assert names == ["xid-off-the-bus", "xid-memory", "xid-link-peer", "xid-link", "disk-full", "port-taken"]
    assert matcher.rule_of("OSError: [Errno 28] y 123456") == matcher.rule_of("OSError: [Errno 28] y 654321")
