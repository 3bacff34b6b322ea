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
"""The description of a setting: what it says, and in brackets who says so."""


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
    """One rule under one policy."""

    position: int
    """The place in which it is asked; 1 is the first."""
    name: str
    asks: str
    source: str
    evicts: bool
    """False: it never evicts, and only says why a machine is not evicted."""
    mode: EvictMode
    mode_from: str = ""
    """The setting that says so; empty: the rule's own mode."""
    numbers: list[RuleNumber] = Field(default_factory=list)


class DescribedBreaker(Model):
    """The breaker under one policy."""

    name: str = BREAKER
    asks: str = BREAKER_SAYS
    source: str = ""
    numbers: list[RuleNumber] = Field(default_factory=list)
    without_operator: int | None = None
    """So many machines of the job may leave within the window without an operator; None: its size is not known."""


class DescribedPolicy(Model):
    """Everything that decides which machines leave a job."""

    of: str
    """``defaults``, or the job file or the job that has it."""
    machines: int | None = None
    """How many machines the job has; None: not known."""
    evict_mode: EvictMode
    rules: list[DescribedRule]
    """In the order in which they are asked; the first that says yes is the one that is named."""
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
    """What one rule said of one machine, and what came of it."""

    followed: str
    """In a few words."""


class StoryLine(Model):
    """One thing that the incident noted about evictions, or about the next attempt."""

    time_ns: int
    stage: str
    text: str


class Explanation(Model):
    """What the rules of eviction said in one incident."""

    incident: str
    headline: str
    over: bool
    """The incident is closed."""
    outcome: str
    """How it ended; of an open one: its stage, and what that waits for."""
    evicted: list[str]
    """Machines that left the job."""
    answers: list[ExplainedAnswer]
    """In the order in which they were given, machine by machine."""
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
    """Answers, each with what followed.

    Args:
        answers: Of one incident.
        evicted: Machines that left the job in it.
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
    """Names of the rules that were asked and said nothing, and of those that were not asked."""
    off = [rule.name for rule in RULES if mode_of(rule, policy) is EvictMode.OFF]
    heard = {answer.rule for answer in answers}
    return [rule.name for rule in RULES if rule.name not in heard and rule.name not in off], off
