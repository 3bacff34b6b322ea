"""Whether a job still saves: a checkpoint that goes stale without a word would be noticed when it is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import Anomaly, Symptom


@dataclass(frozen=True, slots=True)
class Saves:
    """What one machine says of the steps and the saves of one of its ranks; times in ns of the watcher's clock."""

    rank: int
    machine: str
    generation: int
    completed_steps: int
    own_step: int
    """Newest step in its own memory; -1: none was ever saved."""
    own_ns: int
    """When that was saved; it may have been by an earlier generation."""
    first_step_ns: int
    """When this process completed its first step; 0: not yet."""
    now_ns: int
    """When the machine said so."""

    @property
    def unsaved_steps(self) -> int:
        """Steps that are completed and not saved."""
        return self.completed_steps - self.own_step

    @property
    def unsaved_s(self) -> float:
        """How long the newest save is ago, not counting the time before this process stepped."""
        return (self.now_ns - max(self.own_ns, self.first_step_ns)) / 1e9


def judge_saves(ranks: Iterable[Saves], *, job: str, generation: int, policy: CheckpointPolicy) -> Anomaly | None:
    """The anomaly that saves stopped, named by the rank that is furthest behind; None while all goes well.

    A rank that never saved is left alone: its script keeps no state with
    everstep. Both limits must be passed, so that neither a long step nor a burst
    of short ones is taken for it.

    Args:
        ranks: As their machines showed them last, of any generation.
        job: Name of the job.
        generation: The one that is judged.
        policy: How old the newest save may be.
    """
    behind = [
        one
        for one in ranks
        if one.generation == generation
        and one.own_step >= 0
        and one.first_step_ns > 0
        and one.unsaved_steps > policy.max_unsaved_steps
        and one.unsaved_s > policy.max_unsaved_s
    ]
    if not behind:
        return None
    worst = max(behind, key=lambda one: (one.unsaved_steps, one.unsaved_s, -one.rank))
    others = [str(one.rank) for one in sorted(behind, key=lambda one: one.rank) if one is not worst]
    more = f"; likewise rank {', '.join(others[:8])}{' …' if len(others) > 8 else ''}" if others else ""
    return Anomaly(
        id=f"unsaved-{job}-{generation}",
        generation=generation,
        symptom=Symptom.UNSAVED,
        headline=f"rank {worst.rank} on {worst.machine} goes on and does not save: its newest checkpoint, "
        f"of step {worst.own_step}, is {worst.unsaved_steps} steps and {worst.unsaved_s:.0f} s old{more}",
        ranks=sorted(one.rank for one in behind),
        machines=sorted({one.machine for one in behind}),
        seen_ns=worst.now_ns,
    )
