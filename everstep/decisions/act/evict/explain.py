"""The rules of eviction for people: a job's policy in words and numbers, and what the rules answered in an incident.

``everstep policy`` shows the first, ``everstep policy explain`` the second.
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

BREAKER_SAYS = (
    "asked last, of all machines that are to be evicted together: where they are too many, an operator has to approve "
    "all of them"
)
BREAKER_SETTINGS = ("evict.share", "evict.at_least", "evict.window_h")
_SOURCED = re.compile(r"(?P<says>.*) \((?P<source>.*)\)\.")
"""The description of a setting: its meaning, and its source in brackets."""


class RuleNumber(Model):
    """A number that a rule, or the breaker, goes by."""

    name: str
    value: float
    says: str
    source: str
    """A paper's section; empty: no paper gives the number."""
    default: float | None = None
    """The default of a setting of the table ``[policy]``; None: the number is fixed."""


class DescribedRule(Model):
    """The description of one rule under one policy."""

    position: int
    """The place in which it is asked; 1 is the first."""
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
    asks: str = BREAKER_SAYS
    source: str = ""
    numbers: list[RuleNumber] = Field(default_factory=list)
    without_operator: int | None = None
    """Machines of the job that may leave within the window without an operator; None: the job's size is not known."""


class DescribedPolicy(Model):
    """Everything that decides which machines leave a job."""

    of: str
    """``defaults``, or the job file or the job that has it."""
    machines: int | None = None
    """The number of machines of the job; None: not known."""
    evict_mode: EvictMode
    rules: list[DescribedRule]
    """The rules in the order in which they are asked. The first rule that evicts a machine is named as the reason."""
    breaker: DescribedBreaker


def describe(policy: RecoveryPolicy, *, of: str = "defaults", machines: int | None = None) -> DescribedPolicy:
    """The policy of a job.

    Args:
        policy: Its limits and modes.
        of: Whose it is, in a few words.
        machines: How many the job has; None: not known.
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
        RuleNumber(name=number.name, value=number.value, says=number.says, source=number.source)
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
    found = []
    for name in names:
        known = settings()[name]
        told = _SOURCED.fullmatch(known.description or "")
        says, source = (told["says"], told["source"]) if told else ((known.description or "").removesuffix("."), "")
        found.append(RuleNumber(name=name, value=policy.value(name), says=says, source=source, default=known.default))
    return found


class ExplainedAnswer(EvictAnswer):
    """The answer of one rule about one machine, and its result."""

    followed: str
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
    nothing_to_say: list[str] | None = None
    """Rules that were asked and saw nothing that concerns them; None: the policy of the job is not known."""
    not_asked: list[str] = Field(default_factory=list)
    """Rules that the policy of the job has switched off."""
    fault_ns: int = 0
    """The moment that times of the story count from; 0: not known."""
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
        ExplainedAnswer(**answer.model_dump(), followed=_followed(answer, evicted, by.get(answer.machine, ""), over))
        for answer in answers
    ]


def _followed(answer: EvictAnswer, evicted: Collection[str], approved_by: str, over: bool) -> str:
    if answer.rule == BREAKER:
        return "an operator had to approve"
    if not answer.yes:
        return "nothing"
    if answer.mode is EvictMode.SHADOW:
        return "it was written down, and nothing done"
    if answer.machine in evicted:
        return f"it left the job, approved by {approved_by}" if approved_by else "it left the job"
    if over:
        return "it stayed in the job"
    needs = ": that takes an operator's approval" if answer.mode is EvictMode.APPROVE else ""
    return f"it has not left the job{needs}"


def quiet_rules(answers: Sequence[EvictAnswer], policy: RecoveryPolicy) -> tuple[list[str], list[str]]:
    """Return two lists of rule names: rules that were asked and gave no answer, and rules that were not asked."""
    off = [rule.name for rule in RULES if mode_of(rule, policy) is EvictMode.OFF]
    heard = {answer.rule for answer in answers}
    return [rule.name for rule in RULES if rule.name not in heard and rule.name not in off], off
