"""A machine that lost its ranks, or that has gone silent while no rank of the job steps.

Ranks on other machines need not notice: collectives can wait for ten minutes. A silent agent alone is no fault: as long
as the ranks step, its machine works. If all other ranks have ended with success, the job may be over on the silent
machine too.
"""

from __future__ import annotations

from collections.abc import Collection

from everstep.base.text import listed
from everstep.decisions.blame.first_failure import headline_of_loss
from everstep.decisions.detect.hang import PAUSES
from everstep.decisions.detect.job_facts import JobFacts, Rule
from everstep.decisions.detect.rank_ends import is_success
from everstep.model.incident import Anomaly, Symptom


def find_silent_machine(facts: JobFacts) -> Anomaly | None:
    """Return all silent machines in one anomaly; None if all are silent, since the watcher itself may be
    cut off then."""
    policy = facts.spec.policy
    if not facts.newest or facts.longest_step_s <= 0:
        return None
    silent = [machine for machine, since_s in facts.unheard_s.items() if since_s >= policy.silence.detect_s]
    if not silent or len(silent) == facts.spec.machines:
        return None
    patience_s = max(policy.silence.detect_s, PAUSES * facts.longest_step_s)
    if _others_ended_well(facts, silent):
        patience_s = max(patience_s, policy.stop.exit_grace_s)
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
    threshold="{policy.silence.detect_s:g} s of both, and 1.5 times the longest time between steps so far; "
    "{policy.stop.exit_grace_s:g} s where all other ranks ended with code 0",
    source="",
    find=find_silent_machine,
)


def find_lost_machine(facts: JobFacts) -> Anomaly | None:
    """Return all machines that lost their ranks, in one anomaly."""
    if not facts.lost:
        return None
    return Anomaly(
        id=f"lost-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.CRASH,
        headline=headline_of_loss(facts.lost, None),
        ranks=sorted(rank for ranks in facts.lost.values() for rank in ranks),
        machines=sorted(facts.lost),
        seen_ns=facts.now_ns,
        quiet_s=facts.quiet_s,
    )


LOST_MACHINE = Rule(
    name="lost-machine",
    finds="a machine came back and knows nothing of the ranks that it ran",
    threshold="at once",
    source="",
    find=find_lost_machine,
)
