"""The detection of a job that steps but does not save: otherwise its old checkpoint is noticed only when needed."""

from __future__ import annotations

from everstep.base.text import listed
from everstep.decisions.detect.job_facts import JobFacts, RankFacts, Rule
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import Anomaly, Symptom


def find_stale_checkpoint(facts: JobFacts) -> Anomaly | None:
    """Return one anomaly of all ranks that do not save; its headline names the rank with the oldest save.

    A rank that never saved is ignored, since its script saves no state with everstep. Both limits must be exceeded, so
    that neither a long step nor many short steps count as missing saves.
    """
    if not facts.newest:
        return None
    stale = [rank for rank in facts.ranks if _is_stale(rank, facts.spec.checkpoint)]
    if not stale:
        return None
    worst = max(stale, key=lambda rank: (_unsaved_steps(rank), _unsaved_s(rank), -rank.rank))
    others = sorted(rank.rank for rank in stale if rank is not worst)
    more = f"; likewise rank {listed(others)}" if others else ""
    return Anomaly(
        id=f"unsaved-{facts.spec.name}-{facts.generation}",
        generation=facts.generation,
        symptom=Symptom.UNSAVED,
        headline=f"rank {worst.rank} on {worst.machine} steps and does not save: its newest checkpoint, "
        f"of step {worst.saved_step}, is {_unsaved_steps(worst)} steps and {_unsaved_s(worst):.0f} s old{more}",
        ranks=sorted(rank.rank for rank in stale),
        machines=sorted({rank.machine for rank in stale}),
        seen_ns=worst.heard_ns,
    )


def _is_stale(rank: RankFacts, policy: CheckpointPolicy) -> bool:
    saves = rank.alive and rank.saved_step is not None and rank.saved_step >= 0 and rank.first_step_ns > 0
    return saves and _unsaved_steps(rank) > policy.max_unsaved_steps and _unsaved_s(rank) > policy.max_unsaved_s


def _unsaved_steps(rank: RankFacts) -> int:
    """Return the number of steps since the newest save."""
    return rank.completed_steps - (rank.saved_step or 0)


def _unsaved_s(rank: RankFacts) -> float:
    """Return the age of the newest save, seconds, without the time before this process first stepped."""
    return (rank.heard_ns - max(rank.saved_ns, rank.first_step_ns)) / 1e9


STALE_CHECKPOINT = Rule(
    name="stale-checkpoint",
    finds="a rank completes steps and does not save them",
    threshold="the newest save is over {checkpoint.max_unsaved_steps} steps and {checkpoint.max_unsaved_s:g} s old",
    find=find_stale_checkpoint,
)
