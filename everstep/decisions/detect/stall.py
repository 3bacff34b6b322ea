"""No rank of a job completes a step any more."""

from __future__ import annotations

from everstep.decisions.detect.facts import JobFacts
from everstep.decisions.detect.rule import Rule
from everstep.model.incident import Anomaly, Symptom
from everstep.text import listed


def judge(facts: JobFacts) -> Anomaly | None:
    """The stall, when it is too long; machines that are silent may hide that ranks step."""
    policy = facts.spec.policy
    if not facts.newest or facts.quiet_s <= max(policy.stall_factor * facts.typical_step_s, policy.stall_floor_s):
        return None
    headline = f"no rank completed a step for {facts.quiet_s:.0f} s, after step {facts.last_step}"
    if facts.silent:
        headline = f"no step was seen for {facts.quiet_s:.0f} s: the agent of {listed(facts.silent)} does not answer"
    return Anomaly(
        id=f"stall-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.STALL,
        headline=headline,
        machines=list(facts.silent),
        seen_ns=facts.now_ns,
        quiet_s=facts.quiet_s,
    )


STALL = Rule(
    name="stall",
    finds="no rank completes a step any more",
    threshold="{policy.stall_factor:g} median step times, at least {policy.stall_floor_s:g} s",
    source="the floor: hang threshold of ByteRobust, section 4.1; the factor: ours",
    judge=judge,
)
