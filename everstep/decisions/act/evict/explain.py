"""Why machines left a job in an incident, and why others did not: every answer of the rules, and what followed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pydantic import Field

from everstep.decisions.act.evict.rules import RULES, mode_of
from everstep.model.eviction import BREAKER, EvictAnswer, EvictMode
from everstep.model.message import Model
from everstep.model.recovery_policy import RecoveryPolicy


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
