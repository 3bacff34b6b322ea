"""A rank that left with code 0 while others train on.

A rank that left before the end of its loop has broken out of it with all the
others, or has left them alone. The others tell: those that stay in their loops
were left alone. Where they fail for it, ``failed_rank`` says so.
"""

from __future__ import annotations

from everstep.decisions.detect.exits import anomaly_of, is_success
from everstep.decisions.detect.facts import JobFacts
from everstep.decisions.detect.rule import Rule
from everstep.model.incident import Anomaly
from everstep.model.recovery_policy import RecoveryPolicy


def judge(facts: JobFacts) -> Anomaly | None:
    """The rank that left first, once the others did not follow in time."""
    ends = facts.exits.values()
    early = [seen for seen in ends if not seen.finished]
    if not early or len(ends) >= facts.spec.topology().world_size or not all(map(is_success, ends)):
        return None
    others_in_loop = _others_in_loop(facts)
    first = min(early, key=lambda seen: seen.heard_ns)
    patience_s = follow_s(facts.spec.policy, others_in_loop=others_in_loop)
    if others_in_loop is False or facts.now_ns - first.heard_ns <= patience_s * 1e9:
        return None
    return anomaly_of(facts, first)


def follow_s(policy: RecoveryPolicy, *, others_in_loop: bool | None) -> float:
    """Seconds in which the others have to follow a rank that left with code 0.

    Of those without a loop of ours it is not known whether they hang or have
    something left to do: they have as long as a job may hang.
    """
    return policy.exit_grace_s if others_in_loop else max(policy.exit_grace_s, policy.stall_floor_s)


def _others_in_loop(facts: JobFacts) -> bool | None:
    """Whether a rank that lives is within ``run.steps``; False: all of them left it; None: not known."""
    living = [rank for rank in facts.ranks if rank.alive and rank.rank not in facts.exits]
    if any(rank.in_loop for rank in living):
        return True
    return False if living and all(rank.left_loop for rank in living) else None


EARLY_EXIT = Rule(
    name="early-exit",
    finds="a rank left with code 0 and the others did not follow",
    threshold="{policy.exit_grace_s:g} s where others are in their loop, {policy.stall_floor_s:g} s where nobody knows",
    source="",
    judge=judge,
)
