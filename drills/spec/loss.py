"""The strike of a drill: the machines or ranks that it kills, and the steps that the job may lose. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from drills.spec.settings import placement_of
from everstep.decisions.keep.placement import survives
from everstep.model.job import JobSpec

SURVIVED = 1
"""Steps that a loss costs if the backups survive it: only the step under way, since every step is saved."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The machines or ranks that a strike kills; empty: there is no strike."""

    machines: tuple[int, ...] = ()
    """Positions of the machines that lose power, and so their memory."""
    disks: bool = True
    """Whether these machines lose their disks too."""
    ranks: tuple[int, ...] = ()
    """Ranks that are killed, if no machine is lost."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The largest number of steps that a strike may cost, with the reason."""

    steps: int | None
    """The largest number of steps; None: it depends only on the checkpoints on disk."""
    reason: str
    begins_again: bool = False
    """Whether the job starts again, since no step that every rank can restore is left."""


def promise_of(spec: JobSpec, loss: Loss) -> Promise:
    """Return the promise that the placement of the backups makes for a loss."""
    topology, placement = spec.topology(), placement_of(spec)
    lost = set(loss.machines)
    if survives(topology, placement, lost):
        return Promise(SURVIVED, placement.reason if lost else "every rank's own memory is intact")
    return Promise(
        None, f"a rank and its peer are lost together, so the checkpoints on disk decide ({placement.reason})"
    )


def best_step(stored: Mapping[int, AbstractSet[int]]) -> int:
    """Return the latest step that every rank can restore; 0: there is none.

    Args:
        stored: Rank → the steps of which it has a copy.
    """
    return max(set.intersection(*map(set, stored.values())), default=0) if stored else 0
