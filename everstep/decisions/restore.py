"""From which step a job goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from everstep.incident import Held

NOTHING_HELD = -1
"""No rank holds a checkpoint: the script starts as it does by itself."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The agreed step and why."""

    step: int
    """Completed steps of the state to restore; 0: from the beginning; -1: nothing is held."""
    reason: str

    @property
    def origin(self) -> str:
        """Where a restart goes on, for people: ``from step 20``."""
        return f"from step {self.step}" if self.step >= 0 else "from the script's own checkpoint"


def choose_restore(held: Iterable[Held], world_size: int, *, held_before: bool = False) -> Restore:
    """Pick the latest step whose state every rank holds, complete and valid.

    ByteRobust takes the latest checkpoint that completed and does not say how
    ranks agree on it (section 6.3); the common step is our rule.

    Args:
        held: What the machines hold, damaged copies included.
        world_size: Ranks of the job.
        held_before: The job has restored such a checkpoint before, so that holding none means that they are lost.
    """
    holders: dict[int, set[int]] = defaultdict(set)
    damaged: list[Held] = []
    any_held = False
    for one in held:
        any_held = True
        if one.valid:
            holders[one.completed_steps].add(one.rank)
        else:
            damaged.append(one)
    note = "".join(f"; rank {d.rank} on {d.machine}: {d.reason}" for d in damaged[:3])
    if not any_held and held_before:
        return Restore(0, "the checkpoints that the job had are gone")
    if not any_held:
        return Restore(NOTHING_HELD, "no rank holds a checkpoint in memory")
    common = [step for step, ranks in holders.items() if len(ranks) == world_size]
    if common:
        return Restore(max(common), f"step {max(common)} is the latest that all {world_size} ranks hold{note}")
    best = max(holders, key=lambda step: (len(holders[step]), step), default=None)
    if best is None:
        return Restore(0, f"no valid checkpoint{note}")
    missing = sorted(set(range(world_size)) - holders[best])
    shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    return Restore(0, f"no step is held by all ranks: step {best} lacks rank {shown}{note}")
