"""The policy of evictions in words and numbers: what each rule asks, how far it may go, and what it goes by."""

from __future__ import annotations

import re

from pydantic import Field

from everstep.decisions.act.evict.decide import allowed
from everstep.decisions.act.evict.rules import RULES, EvictRule, mode_of
from everstep.model.eviction import BREAKER, EvictMode
from everstep.model.message import Model
from everstep.model.recovery_policy import RecoveryPolicy

BREAKER_SAYS = (
    "asked last, of all machines that are to be evicted together: where they are too many, an operator has to approve "
    "all of them"
)
BREAKER_SETTINGS = ("evict_share", "evict_at_least", "evict_window_h")
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
    """Of a setting of the table ``[policy]``; None: it is fixed."""


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
    """Of the job; None: not known."""
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
        evict_mode=policy.evict_mode,
        rules=[_rule(position, rule, policy) for position, rule in enumerate(RULES, 1)],
        breaker=DescribedBreaker(
            numbers=_settings(BREAKER_SETTINGS, policy),
            without_operator=None if machines is None else allowed(machines, policy),
        ),
    )


def _rule(position: int, rule: EvictRule, policy: RecoveryPolicy) -> DescribedRule:
    mode, alone = mode_of(rule, policy), mode_of(rule, policy.model_copy(update={"evict_mode": EvictMode.ACT}))
    own = "evict_rules" if rule.name in policy.evict_rules else ""
    fixed = [RuleNumber(name=one.name, value=one.value, says=one.says, source=one.source) for one in rule.fixed]
    return DescribedRule(
        position=position,
        name=rule.name,
        asks=rule.says,
        source=rule.source,
        evicts=rule.evicts,
        mode=mode,
        mode_from=own if mode is alone else "evict_mode",
        numbers=_settings(rule.settings, policy) + fixed,
    )


def _settings(names: tuple[str, ...], policy: RecoveryPolicy) -> list[RuleNumber]:
    found = []
    for name in names:
        known = RecoveryPolicy.model_fields[name]
        told = _SOURCED.fullmatch(known.description or "")
        says, source = (told["says"], told["source"]) if told else ((known.description or "").removesuffix("."), "")
        found.append(
            RuleNumber(name=name, value=getattr(policy, name), says=says, source=source, default=known.default)
        )
    return found
