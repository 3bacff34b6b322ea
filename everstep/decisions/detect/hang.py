"""No rank of a job completes a step any more."""

from __future__ import annotations

from everstep.base.text import listed
from everstep.decisions.blame.hang.verdict import names_of
from everstep.decisions.detect.facts import JobFacts
from everstep.decisions.detect.patience import bound_s
from everstep.decisions.detect.rule import Rule
from everstep.model.incident import Anomaly, Symptom

NAMED = 16
"""Ranks and machines that an anomaly has."""


def judge(facts: JobFacts) -> Anomaly | None:
    """The hang, once it is long enough; machines that are silent may hide that ranks step."""
    if not facts.newest or facts.quiet_s <= bound_s(facts):
        return None
    headline = f"no rank completed a step for {facts.quiet_s:.0f} s, after step {facts.last_step}"
    machines: list[str] = list(facts.silent)
    ranks: list[int] = []
    if facts.silent:
        headline = f"no step was seen for {facts.quiet_s:.0f} s: the agent of {listed(facts.silent)} does not answer"
    elif facts.standing is not None and facts.standing.verdict.evicts:
        verdict = facts.standing.verdict
        ranks = list(verdict.ranks[:NAMED])
        machines = list(names_of(verdict.machines, facts.machine_names))[:NAMED]
        headline = f"{headline}: {verdict.reason}"
    return Anomaly(
        id=f"hang-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.HANG,
        headline=headline,
        ranks=ranks,
        machines=machines,
        seen_ns=facts.now_ns,
        quiet_s=facts.quiet_s,
    )


HANG = Rule(
    name="hang",
    finds="no rank completes a step any more",
    threshold="{policy.hang_factor:g} median step times, at least {policy.hang_floor_s:g} s, where looks show that all "
    "wait for some that do nothing; {policy.stall_factor:g}, at least {policy.stall_floor_s:g} s, where they do not; "
    "{policy.stall_ceiling_s:g} s where ranks are seen to compute",
    source="where looks show nothing: hang threshold of ByteRobust, section 4.1; the others: ours",
    judge=judge,
)
