"""Describes the eviction rules for people, and explains the answers of the rules in one incident.

``everstep policy`` shows the rules under a job's policy. ``everstep policy explain`` shows the answers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from pydantic import Field

from everstep.decisions.act.evict.plan_evictions import allowed
from everstep.decisions.act.evict.rules import RULES, EvictRule, mode_of
from everstep.model.eviction import BREAKER, EvictAnswer, EvictMode
from everstep.model.message import Model
from everstep.model.recovery_policy import RecoveryPolicy, settings

BREAKER_ASKS = (
    "asked last, about all machines that are to be evicted together: if there are too many, an operator has to "
    "approve all of them"
)
BREAKER_SETTINGS = ("evict.share", "evict.at_least", "evict.window_h")
_SOURCED = re.compile(r"(?P<meaning>.*) \((?P<source>.*)\)\.")
"""The description of a setting: its meaning, and its source in brackets."""


class RuleNumber(Model):
    """A number that a rule or the breaker uses."""

    name: str
    value: float
    meaning: str
    source: str
    """A paper's section; empty: no paper gives the number."""
    default: float | None = None
    """The default of a setting of the table ``[policy]``; None: the number is fixed."""


class DescribedRule(Model):
    """The description of one rule under one policy."""

    position: int
    """The position of the rule in the order in which rules are asked; 1 is the first."""
    name: str
    asks: str
    source: str
    evicts: bool
    """False: the rule never evicts; it only explains why a machine is not evicted."""
    mode: EvictMode
    mode_from: str = ""
    """The setting that sets the mode; empty: the rule's own mode applies."""
    numbers: list[RuleNumber] = Field(default_factory=list)


class DescribedBreaker(Model):
    """The description of the breaker under one policy."""

    name: str = BREAKER
    asks: str = BREAKER_ASKS
    source: str = ""
    numbers: list[RuleNumber] = Field(default_factory=list)
    without_operator: int | None = None
    """How many machines of the job may leave within the window without an operator's approval; None: the job's size
    is not known."""


class DescribedPolicy(Model):
    """The eviction policy of a job: the rules, the breaker, and their numbers."""

    of: str
    """The owner of the policy: ``defaults``, a job file or a job."""
    machines: int | None = None
    """The number of machines of the job; None: not known."""
    evict_mode: EvictMode
    rules: list[DescribedRule]
    """The rules in the order in which they are asked. The first rule that evicts a machine is named as the reason."""
    breaker: DescribedBreaker


def describe(policy: RecoveryPolicy, *, of: str = "defaults", machines: int | None = None) -> DescribedPolicy:
    """Describe the eviction policy of a job.

    Args:
        policy: The limits and modes.
        of: The owner of the policy: ``defaults``, a job file or a job.
        machines: The number of machines of the job; None: not known.
    """
    return DescribedPolicy(
        of=of,
        machines=machines,
        evict_mode=policy.evict.mode,
        rules=[_rule(position, rule, policy) for position, rule in enumerate(RULES, 1)],
        breaker=DescribedBreaker(
            numbers=_settings(BREAKER_SETTINGS, policy),
            without_operator=None if machines is None else allowed(machines, policy),
        ),
    )


def _rule(position: int, rule: EvictRule, policy: RecoveryPolicy) -> DescribedRule:
    mode, alone = mode_of(rule, policy), mode_of(rule, policy.changed({"evict.mode": EvictMode.ACT}))
    own = "evict.rules" if rule.name in policy.evict.rules else ""
    fixed = [
        RuleNumber(name=number.name, value=number.value, meaning=number.meaning, source=number.source)
        for number in rule.fixed
    ]
    return DescribedRule(
        position=position,
        name=rule.name,
        asks=rule.asks,
        source=rule.paper,
        evicts=rule.evicts,
        mode=mode,
        mode_from=own if mode is alone else "evict.mode",
        numbers=_settings(rule.settings, policy) + fixed,
    )


def _settings(names: tuple[str, ...], policy: RecoveryPolicy) -> list[RuleNumber]:
    numbers = []
    for name in names:
        default, text = settings()[name].default, settings()[name].description or ""
        sourced = _SOURCED.fullmatch(text)
        meaning, source = (sourced["meaning"], sourced["source"]) if sourced else (text.removesuffix("."), "")
        value = policy.value(name)
        numbers.append(RuleNumber(name=name, value=value, meaning=meaning, source=source, default=default))
    return numbers


class ExplainedAnswer(EvictAnswer):
    """The answer of one rule about one machine, and its result."""

    result: str
    """The result of the answer, in a few words."""


class StoryLine(Model):
    """A note of the incident about evictions or about the next attempt."""

    time_ns: int
    stage: str
    text: str


class Explanation(Model):
    """The answers of the eviction rules in one incident."""

    incident: str
    headline: str
    over: bool
    """The incident is closed."""
    outcome: str
    """The outcome of the incident; for an open incident its stage, and the reason why it waits."""
    evicted: list[str]
    """Machines that left the job."""
    answers: list[ExplainedAnswer]
    """The answers in the order in which the rules gave them, machine by machine."""
    no_answer: list[str] | None = None
    """Rules that were asked and had no finding to answer; None: the policy of the job is not known."""
    not_asked: list[str] = Field(default_factory=list)
    """Rules that the policy of the job has switched off."""
    fault_ns: int = 0
    """The time of the fault, from which the times of the story are counted; 0: not known."""
    story: list[StoryLine] = Field(default_factory=list)


def explained(
    answers: Sequence[EvictAnswer], evicted: Collection[str], *, over: bool, approved: Mapping[str, str] | None = None
) -> list[ExplainedAnswer]:
    """List the answers, each with its result.

    Args:
        answers: The answers of one incident.
        evicted: Machines that left the job in this incident.
        over: The incident is closed.
        approved: Machine that left the job → the operator who approved it.
    """
    by = approved or {}
    return [
        ExplainedAnswer(**answer.model_dump(), result=_result(answer, evicted, by.get(answer.machine, ""), over))
        for answer in answers
    ]


def _result(answer: EvictAnswer, evicted: Collection[str], approved_by: str, over: bool) -> str:
    if answer.rule == BREAKER:
        return "an operator had to approve"
    if not answer.yes:
        return "nothing"
    if answer.mode is EvictMode.SHADOW:
        return "noted only: the rule is in shadow mode"
    if answer.machine in evicted:
        return f"it left the job, approved by {approved_by}" if approved_by else "it left the job"
    if over:
        return "it stayed in the job"
    return "an operator has to approve" if answer.mode is EvictMode.APPROVE else "it has not left the job yet"


def quiet_rules(answers: Sequence[EvictAnswer], policy: RecoveryPolicy) -> tuple[list[str], list[str]]:
    """Return two lists of rule names: rules that were asked and gave no answer, and rules that were not asked."""
    off = [rule.name for rule in RULES if mode_of(rule, policy) is EvictMode.OFF]
    answered = {answer.rule for answer in answers}
    return [rule.name for rule in RULES if rule.name not in answered and rule.name not in off], off
