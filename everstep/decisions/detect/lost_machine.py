"""The detection of a machine that lost its ranks, or that is silent while no rank of the job steps.

Ranks on other machines may not notice the lost ranks for ten minutes, since collectives can wait that long. A silent
agent alone is no fault: as long as the ranks step, its machine works. If all other ranks have ended with success, the
job may be over on the silent machine too, and no step is expected any more. In this case the time without a step is
counted from the end of the last of these ranks.
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
    """Return one anomaly of all silent machines; None if all are silent, since then the watcher may be cut off.

    The only machine of a job is reported if another machine of the cluster answers.
    """
    policy = facts.spec.policy
    if not facts.newest:
        return None
    silent = [machine for machine, since_s in facts.unheard_s.items() if since_s >= policy.silence.detect_s]
    if not silent:
        return None
    if len(silent) == facts.spec.machines:
        is_long = min(facts.unheard_s.values()) >= policy.silence.only_machine_s
        if not (facts.spec.machines == 1 and facts.others_answer and is_long):
            return None
    patience_s, quiet_s = max(policy.silence.detect_s, PAUSES * facts.longest_step_s), facts.quiet_s
    if _others_ended_well(facts, silent):
        ended_ns = max(seen.heard_ns for seen in facts.exits.values())
        unheard_s = min(facts.unheard_s[machine] for machine in silent)
        patience_s = max(patience_s, policy.stop.exit_grace_s)
        quiet_s = max(quiet_s, min(unheard_s, (facts.now_ns - ended_ns) / 1e9))
    elif facts.longest_step_s <= 0:
        return None
    if quiet_s < patience_s:
        return None
    return Anomaly(
        id=f"silent-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.MACHINE_SILENT,
        headline=f"no answer of {listed(sorted(silent), 4)}, and no rank completed a step for {quiet_s:.0f} s",
        machines=sorted(silent),
        seen_ns=facts.now_ns,
        quiet_s=quiet_s,
    )


def _others_ended_well(facts: JobFacts, silent: Collection[str]) -> bool:
    if not facts.machine_names:
        return False
    topology = facts.spec.topology()
    others = [rank for rank in range(topology.world_size) if facts.machine_names[topology.machine(rank)] not in silent]
    return bool(others) and all(rank in facts.exits and is_success(facts.exits[rank]) for rank in others)


SILENT_MACHINE = Rule(
    name="silent-machine",
    finds="a machine does not answer, and no rank completes a step",
    threshold="both for {policy.silence.detect_s:g} s, or {policy.silence.only_machine_s:g} s for the only machine of "
    "a job while another machine of the cluster answers; no step for 1.5 times the longest time between steps so far, "
    "and for {policy.stop.exit_grace_s:g} s if all other ranks ended with code 0",
    find=find_silent_machine,
)


def find_lost_machine(facts: JobFacts) -> Anomaly | None:
    """Return one anomaly of all machines that lost their ranks."""
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
    finds="a machine lost its memory, and so the ranks that it ran",
    threshold="at once",
    find=find_lost_machine,
)
