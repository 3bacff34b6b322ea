"""The second fault of a drill, and the steps that a job may lose by it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from drills.spec.settings import placement_of
from everstep.decisions.keep.placement import survives
from everstep.model.job import JobSpec

SURVIVED = 1
"""Steps lost by a loss that the placement of backups survives: only the one under way (section 7: every step)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The second fault: machines or ranks that are killed so that copies are needed."""

    machines: tuple[int, ...] = ()
    """Positions of machines that lose power, and so their memory."""
    disks: bool = True
    """The machines' disks are lost too: they come back empty."""
    ranks: tuple[int, ...] = ()
    """Ranks that are killed, if no machine is lost."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The most steps that a strike may cost, and why."""

    steps: int | None
    """Most steps; None: the only promise is a restore from the disks."""
    reason: str
    begins_again: bool = False
    """No step is left that every rank can restore."""


def promise_of(spec: JobSpec, loss: Loss) -> Promise:
    """The promise of the backups' placement for the loss of machines or ranks."""
    topology, placement = spec.topology(), placement_of(spec)
    lost = set(loss.machines)
    if survives(topology, placement, lost):
        return Promise(SURVIVED, placement.reason if lost else "every rank's own memory is left")
    return Promise(None, f"owner and peer are lost together: what the disks hold counts ({placement.reason})")


def best_step(stored: Mapping[int, AbstractSet[int]]) -> int:
    """The latest step that every rank can restore; 0: the job starts again.

    Args:
        stored: Rank → the steps with a copy left.
    """
    steps = [set(copy) for copy in stored.values()]
    return max(set.intersection(*steps), default=0) if steps else 0
