"""The steps that a machine keeps on its disk; pure.

``everstep/decisions/keep/disk_schedule.py`` describes how the machines agree on them through the
watchers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from everstep.decisions.keep.next_copy import roundness

OPEN_STEPS = 2
"""Steps that are kept because all ranks may yet have them, besides the newest ``disk_keep``."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The reports of watchers to this machine, and the step that it has promised to keep; a step of 0:
    there is none."""

    settled: int = 0
    """Every rank keeps it: what is older may go."""
    promised: int = 0
    """The step that is kept until it is settled or gone; ``settled`` if no other step is promised."""
    named: int = 0
    """The newest that a watcher asked all machines to write."""
    gone: frozenset[int] = frozenset()
    """Steps on this disk that some rank does not have and never will."""
    passed: int = 0
    """Every step up to this step is on this disk, or never will be."""


def agreed(kept: Kept, held: Collection[int], *, keep: int, settled: int, gone: Collection[int]) -> Kept:
    """Return the state after the message of a watcher.

    Args:
        kept: The state until now.
        held: Steps that all ranks of this machine have on disk.
        keep: As in ``Agreed``.
        settled: Likewise.
        gone: Likewise.
    """
    newest = max(kept.settled, settled) if settled in held else kept.settled
    promised = kept.promised
    if promised <= newest or promised in gone or promised not in held:
        promised = keep if keep in held and keep > newest else newest
    return replace(kept, settled=newest, promised=promised, gone=(kept.gone | frozenset(gone)) & frozenset(held))


def went_back(kept: Kept, resume_step: int) -> Kept:
    """Return the state after a job resumes from a step: later steps belong to a future that it abandons."""
    settled = kept.settled if kept.settled <= resume_step else 0
    return Kept(settled, kept.promised if kept.promised <= resume_step else settled)


def steps_to_keep(held: Collection[int], kept: Kept, *, newest: int) -> set[int]:
    """Return the steps that stay; all other steps of ``held`` may be deleted.

    Among the steps that all ranks may or may not get, the requested step stays, then the roundest: a slow disk gets a
    part of the steps of a faster disk, and the rounder part.

    Args:
        held: Steps that all ranks of this machine have on disk.
        kept: The reported and promised steps.
        newest: How many of the newest steps stay, ``disk_keep``.
    """
    still_open = [step for step in held if step > kept.settled and step not in kept.gone]
    likeliest_last = sorted(still_open, key=lambda step: (step == kept.named, roundness(step), step))
    return {kept.settled, kept.promised, *sorted(held)[-newest:], *likeliest_last[-OPEN_STEPS:]}
