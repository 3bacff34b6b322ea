"""Which step on disk all ranks keep, so that there always is one that they have in common.

Disks differ: a slow one gets every 2nd, 4th, … of the steps that a fast one
gets, and later. Each machine deletes old steps, and what one of them deletes,
the others may just have finished. So a step that all ranks were seen to have is
told to all of them as one to *keep*. A machine that has it says so, and deletes
it no more. When all have said so, it is *settled*, and only then may older
steps go, and the next one is named.

So messages may be late, lost or repeated, there may be several watchers, and
agents and workers may be restarted: what a conclusion rests on are facts that
stay true. A machine gives up a step that it keeps only for a later one that is
settled, or because the step is *gone*: some rank has passed it without having
it on disk, and so never will.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepsOnDisk:
    """What one rank's machine says of the steps on its disk; alike for all ranks of a machine."""

    steps: frozenset[int]
    """Steps that are there for all ranks of the machine."""
    passed: int = 0
    """Every step up to this one is among them or never will be; 0: not known."""
    kept: int = 0
    """The one that it keeps until it hears that it is settled or gone; 0: none."""
    settled: int = 0
    """The newest that it heard to be settled; 0: none."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What machines should know."""

    keep: int = 0
    """The step that every rank should keep; 0: there is none."""
    settled: int = 0
    """The newest that every rank keeps: older ones may go; 0: none."""
    gone: tuple[int, ...] = ()
    """Steps on some disk that some rank does not have and never will."""


def newest_of_all(ranks: Collection[StepsOnDisk]) -> int:
    """The newest step that all of some ranks have on disk; 0: there is none."""
    return max(frozenset.intersection(*(disk.steps for disk in set(ranks))), default=0) if ranks else 0


def agree(ranks: Sequence[StepsOnDisk], world_size: int) -> Agreed:
    """What to tell every machine.

    Args:
        ranks: Of one generation, as their machines showed them last.
        world_size: Ranks of the job; while some of them are not known, nothing is concluded.
    """
    if len(ranks) < world_size:
        return Agreed()
    machines = set(ranks)
    held = frozenset.union(*(disk.steps for disk in machines))
    gone = {step for step in held if any(step not in disk.steps and step <= disk.passed for disk in machines)}
    kept = max(disk.kept for disk in machines)
    settled = max(disk.settled for disk in machines)
    if all(disk.kept == kept and kept in disk.steps for disk in machines):
        settled = max(settled, kept)
    if kept <= settled or kept in gone:
        kept = newest_of_all(machines)
    return Agreed(kept, settled, tuple(sorted(gone)))
