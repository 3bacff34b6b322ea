"""A machine of which nothing is heard, while no rank of the job steps.

Without a broken connection nobody else notices: collectives wait for ten minutes. A silent agent alone says nothing:
as long as the ranks step, its machine works. Where all other ranks have ended
well, the job may be over there too, and its agent is only not back to say so.
"""

from __future__ import annotations

from collections.abc import Collection

from everstep.base.text import listed
from everstep.decisions.detect.exits import is_success
from everstep.decisions.detect.facts import JobFacts
from everstep.decisions.detect.patience import PAUSES
from everstep.decisions.detect.rule import Rule
from everstep.model.incident import Anomaly, Symptom


def judge(facts: JobFacts) -> Anomaly | None:
    """All such machines in one anomaly; none where all are silent, for then it may be the watcher who is cut off."""
    policy = facts.spec.policy
    if not facts.newest or facts.longest_step_s <= 0:
        return None
    silent = [machine for machine, since_s in facts.unheard_s.items() if since_s >= policy.silent_s]
    if not silent or len(silent) == facts.spec.machines:
        return None
    patience_s = max(policy.silent_s, PAUSES * facts.longest_step_s)
    if _others_ended_well(facts, silent):
        patience_s = max(patience_s, policy.exit_grace_s)
    if facts.quiet_s < patience_s:
        return None
    verb = "says" if len(silent) == 1 else "say"
    return Anomaly(
        id=f"silent-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.MACHINE_SILENT,
        headline=f"{listed(sorted(silent), 4)} {verb} nothing, and no rank completed a step for {facts.quiet_s:.0f} s",
        machines=sorted(silent),
        seen_ns=facts.now_ns,
        quiet_s=facts.quiet_s,
    )


def _others_ended_well(facts: JobFacts, silent: Collection[str]) -> bool:
    topology = facts.spec.topology()
    others = (
        [rank for rank in range(topology.world_size) if facts.machine_names[topology.machine(rank)] not in silent]
        if facts.machine_names
        else []
    )
    return bool(others) and all(rank in facts.exits and is_success(facts.exits[rank]) for rank in others)


SILENT_MACHINE = Rule(
    name="silent-machine",
    finds="nothing is heard of a machine, and no rank completes a step",
    threshold="{policy.silent_s:g} s of both, and 1.5 times the longest time between steps so far; "
    "{policy.exit_grace_s:g} s where all other ranks ended with code 0",
    source="",
    judge=judge,
)
