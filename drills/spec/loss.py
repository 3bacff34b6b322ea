"""What a drill kills in the end, and what a job deserves to lose by it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from drills.spec.settings import placement_of
from everstep.decisions.keep.placement import survives
from everstep.model.job import JobSpec

SURVIVED = 1
"""What the placement of backups survives costs the step that was under way, and no more (section 7: every step)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Second fault: what is killed so that copies are needed."""

    machines: tuple[int, ...] = ()
    """They lose power, and with it their memory."""
    disks: bool = True
    """Their disks are lost too: they come back empty."""
    ranks: tuple[int, ...] = ()
    """Or these are killed, and no machine is lost."""


@dataclass(frozen=True, slots=True)
class Promise:
    """How many steps a strike may cost, and why."""

    steps: int | None
    """None: nothing is promised but that what the disks hold is used."""
    reason: str
    begins_again: bool = False
    """No step is left that every rank can restore."""


def promise_of(spec: JobSpec, loss: Loss) -> Promise:
    """What the placement of the backups promises for the loss of the struck machines."""
    topology, placement = spec.topology(), placement_of(spec)
    lost = set(loss.machines)
    if survives(topology, placement, lost):
        return Promise(SURVIVED, placement.reason if lost else "every rank's own memory is left")
    return Promise(None, f"owner and peer are lost together: what the disks hold counts ({placement.reason})")


def best_step(stored: Mapping[int, AbstractSet[int]]) -> int:
    """The latest step that every rank can restore; 0: the job begins again.

    Args:
        stored: For each rank the steps of which a copy is left.
    """
    steps = [set(copy) for copy in stored.values()]
    return max(set.intersection(*steps), default=0) if steps else 0
