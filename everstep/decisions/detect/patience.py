"""How long without a step is a hang: as long as what is seen of the job, and what it did before, allow."""

from __future__ import annotations

from everstep.decisions.blame.hang.standstill import Stillness
from everstep.decisions.detect.facts import JobFacts
from everstep.model.recovery_policy import RecoveryPolicy

PAUSES = 1.5
"""A pause for an evaluation or a checkpoint is at most so many times as long as the longest one seen before."""
LOOKS_APART_S = (1.0, 10.0)
"""Between two looks at a job that stands still: a median step, at least and at most, seconds."""
TWO_LOOKS_S = 0.5
"""Two looks take so long themselves; where they take longer, a hang is told later."""
LOOK_AGAIN = 2.0
"""Looks come again after so many times as long a standstill."""


def hang_unseen_s(facts: JobFacts) -> float:
    """How long without a step is a hang where looks show nothing: the paper's ten minutes, or longer where steps or
    pauses of this very job were so long; seconds."""
    policy = facts.spec.policy
    learnt = min(PAUSES * facts.longest_step_s, policy.stall_ceiling_s)
    return max(learnt, policy.stall_factor * facts.typical_step_s, policy.stall_floor_s)


def hang_seen_s(facts: JobFacts) -> float:
    """How long without a step is a hang where all ranks are seen to wait for some that do nothing; seconds.

    It is never longer than where looks show nothing, and as long as that until a step was seen to take its time: a
    watcher that is new to the job may have begun in a usual pause.
    """
    return _learnt_hang_seen_s(facts) if facts.typical_step_s > 0 else hang_unseen_s(facts)


def _learnt_hang_seen_s(facts: JobFacts) -> float:
    policy = facts.spec.policy
    learnt = max(policy.hang_factor * facts.typical_step_s, PAUSES * facts.longest_step_s, policy.hang_floor_s)
    return min(learnt, hang_unseen_s(facts))


def bound_s(facts: JobFacts) -> float:
    """How long without a step is a hang, by what looks at its ranks show; seconds."""
    if facts.standing is None:
        return hang_unseen_s(facts)
    match facts.standing.standing:
        case Stillness.NEVER:
            return min(facts.spec.policy.stopped_s, hang_seen_s(facts))
        case Stillness.QUIET:
            return hang_seen_s(facts)
        case Stillness.COMPUTES:
            return max(hang_unseen_s(facts), facts.spec.policy.stall_ceiling_s)
    return hang_unseen_s(facts)


def apart_s(typical_step_s: float) -> float:
    """Between two looks, seconds."""
    least, most = LOOKS_APART_S
    return min(max(typical_step_s, least), most)


def first_look_s(facts: JobFacts) -> float | None:
    """How long a standstill is looked at first, so that a second look is over when it may be a hang; None: never."""
    early_s = apart_s(facts.typical_step_s) + TWO_LOOKS_S
    return max(_learnt_hang_seen_s(facts) - early_s, 0.0) if looks(facts.spec.policy) else None


def looks(policy: RecoveryPolicy) -> bool:
    """Whether ranks of a job that stands still are looked at."""
    return policy.trace_s > 0
