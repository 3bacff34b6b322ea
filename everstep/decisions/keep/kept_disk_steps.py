"""Decides which steps a machine keeps on its disk.

``everstep/decisions/keep/disk_schedule.py`` describes how all machines agree on a step to keep.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from everstep.decisions.keep.next_copy import roundness

OPEN_STEPS = 2
"""The number of steps that are kept besides the newest ``disk_keep`` steps, because all ranks may still get them."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What this machine knows of the steps on all disks, and the step that it promised to keep. Step 0 means none."""

    settled: int = 0
    """The newest step that every machine keeps: older steps may be deleted."""
    promised: int = 0
    """The step that this machine keeps until it is settled or gone; ``settled`` if no other step is promised."""
    named: int = 0
    """The newest step that the watchers requested from all machines."""
    gone: frozenset[int] = frozenset()
    """Steps on this disk that some rank does not have and never will have."""
    passed: int = 0
    """Every step up to this step is on this disk, or never will be."""


def agreed(kept: Kept, held: Collection[int], *, keep: int, settled: int, gone: Collection[int]) -> Kept:
    """Return the state after a message of a watcher (``everstep.decisions.keep.disk_schedule.Agreed``).

    Args:
        kept: The state before the message.
        held: Steps that all ranks of this machine have on disk.
        keep: The step to keep, by the message.
        settled: The newest settled step, by the message.
        gone: The steps that are gone, by the message.
    """
    newest = max(kept.settled, settled) if settled in held else kept.settled
    promised = kept.promised
    if promised <= newest or promised in gone or promised not in held:
        promised = keep if keep in held and keep > newest else newest
    return replace(kept, settled=newest, promised=promised, gone=(kept.gone | frozenset(gone)) & frozenset(held))


def went_back(kept: Kept, resume_step: int) -> Kept:
    """Return the state after the job resumed from a step: later steps do not belong to its line any more."""
    settled = kept.settled if kept.settled <= resume_step else 0
    return Kept(settled, kept.promised if kept.promised <= resume_step else settled)


def steps_to_keep(held: Collection[int], kept: Kept, *, newest: int) -> set[int]:
    """Return the steps to keep; all other steps of ``held`` may be deleted.

    Of the later steps that all ranks may still get, the requested step is kept first, and then the roundest steps,
    since a slower disk gets only the rounder steps.

    Args:
        held: Steps that all ranks of this machine have on disk.
        kept: The facts about steps on all disks, and the promised step.
        newest: How many of the newest steps are kept: ``disk_keep``.
    """
    still_open = [step for step in held if step > kept.settled and step not in kept.gone]
    likeliest_last = sorted(still_open, key=lambda step: (step == kept.named, roundness(step), step))
    return {kept.settled, kept.promised, *sorted(held)[-newest:], *likeliest_last[-OPEN_STEPS:]}
