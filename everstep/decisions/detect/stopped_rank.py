"""A rank whose process is stopped, while no rank of the job steps: nothing will come of waiting.

Somebody who stops all ranks pauses the job on purpose: that is a hang, if it lasts. They are stopped, and
continued, one after the other.
"""

from __future__ import annotations

from everstep.base.text import listed
from everstep.decisions.detect.facts import JobFacts
from everstep.decisions.detect.rule import Rule
from everstep.model.incident import Anomaly, Symptom

CONTINUED_S = 2.0
"""Agents tell within this time that a rank goes on, so that all are told of that are continued together."""
NAMED = 16
"""Ranks that an anomaly has."""


def judge(facts: JobFacts) -> Anomaly | None:
    """All ranks that are stopped, in one anomaly."""
    least_s = facts.spec.policy.stopped_s
    if not facts.newest or facts.quiet_s < least_s:
        return None
    alive = [rank for rank in facts.ranks if rank.alive]
    going_on = [rank for rank in alive if not rank.stopped_ns]
    if not going_on or any((facts.now_ns - rank.continued_ns) / 1e9 < CONTINUED_S for rank in going_on):
        return None
    stopped = [rank for rank in alive if rank.stopped_ns and (facts.now_ns - rank.stopped_ns) / 1e9 >= least_s]
    if not stopped:
        return None
    machines = sorted({rank.machine for rank in stopped})
    verb = "is" if len(stopped) == 1 else "are"
    return Anomaly(
        id=f"stopped-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.HANG,
        headline=f"rank {listed(sorted(rank.rank for rank in stopped), 4)} on {listed(machines, 4)} {verb} stopped "
        f"(state T), and no rank completed a step for {facts.quiet_s:.1f} s",
        ranks=sorted(rank.rank for rank in stopped)[:NAMED],
        machines=machines[:NAMED],
        seen_ns=facts.now_ns,
        quiet_s=facts.quiet_s,
    )


STOPPED_RANK = Rule(
    name="stopped-rank",
    finds="the process of a rank is stopped, and no rank completes a step",
    threshold="{policy.stopped_s:g} s of both",
    source="",
    judge=judge,
)
