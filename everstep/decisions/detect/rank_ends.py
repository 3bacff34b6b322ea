"""The detection of failures by the ends of ranks: a rank failed, or left with code 0 while other ranks train.

If a rank leaves before the end of its loop, either all ranks leave by ``break``, or the rank leaves the others alone.
Ranks that then stay in their loops were left alone. If they fail, the rule ``failed-rank`` reports the rank that left.
"""

from __future__ import annotations

from collections.abc import Collection

from everstep.decisions.blame.first_failure import first_failure, headline_of, symptom_of
from everstep.decisions.detect.job_facts import JobFacts, ObservedExit, Rule
from everstep.model.incident import Anomaly
from everstep.model.recovery_policy import RecoveryPolicy


def is_success(seen: ObservedExit) -> bool:
    """Return whether a rank ended with success: with code 0, as under torchrun."""
    if seen.end.code == 0:
        return True
    # The exit status is lost if the parent died first. Then only the rank's own report counts.
    return seen.end.code is None and not seen.end.signal and seen.finished


def has_finished(exits: Collection[ObservedExit], world_size: int) -> bool:
    """Return whether all ranks of a generation left with success: the job is done."""
    return len(exits) >= world_size and all(map(is_success, exits))


def anomaly_of(facts: JobFacts, seen: ObservedExit) -> Anomaly:
    """Return the anomaly of a rank's end."""
    end = seen.end
    return Anomaly(
        id=seen.id,
        generation=facts.generation,
        symptom=symptom_of(end),
        headline=headline_of(end),
        ranks=[end.rank],
        machines=[end.machine],
        seen_ns=end.time_ns,
        classification=end.classification,
    )


def find_failed_rank(facts: JobFacts) -> Anomaly | None:
    """Return the first failure, once any rank failed. It may be a rank that left early with success."""
    ends = facts.exits.values()
    if all(map(is_success, ends)):
        return None
    culprit = first_failure([seen.end for seen in ends if not (seen.finished and is_success(seen))])
    assert culprit is not None
    return anomaly_of(facts, next(seen for seen in ends if seen.end is culprit))


FAILED_RANK = Rule(
    name="failed-rank",
    finds="a rank ended by a signal, an exception or an exit code other than 0",
    threshold="at once",
    source="ByteRobust, section 4.1: the exits of training processes",
    find=find_failed_rank,
)


def find_early_exit(facts: JobFacts) -> Anomaly | None:
    """Return the rank that left first, if the other ranks did not follow in time."""
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
    """Return the seconds within which the other ranks have to follow a rank that left with code 0.

    Ranks without a loop of everstep may still have work to do, so they have as long as for a hang.
    """
    return policy.stop.exit_grace_s if others_in_loop else max(policy.stop.exit_grace_s, policy.hang.floor_s)


def _others_in_loop(facts: JobFacts) -> bool | None:
    """Return whether a living rank is within ``run.steps``; False: all of them left it; None: not known."""
    living = [rank for rank in facts.ranks if rank.alive and rank.rank not in facts.exits]
    if any(rank.in_loop for rank in living):
        return True
    return False if living and all(rank.left_loop for rank in living) else None


EARLY_EXIT = Rule(
    name="early-exit",
    finds="a rank left with code 0 and the others did not follow",
    threshold="{policy.stop.exit_grace_s:g} s if other ranks are in their loops, {policy.hang.floor_s:g} s if that is "
    "not known",
    find=find_early_exit,
)
