"""Which steps on its disk a machine keeps. Pure.

``everstep/decisions/keep/disk_schedule.py`` says what the machines learn from each other through
the watchers, and what that rests on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from everstep.decisions.keep.next_copy import roundness

OPEN_STEPS = 2
"""Steps that are kept because all ranks may yet have them, besides the newest ``disk_keep``."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What watchers reported to this machine, and what it has promised to keep; a step of 0: there is none."""

    settled: int = 0
    """Every rank keeps it: what is older may go."""
    promised: int = 0
    """Kept until it is settled, or gone; ``settled`` where nothing else is promised."""
    named: int = 0
    """The newest that a watcher asked all machines to write."""
    gone: frozenset[int] = frozenset()
    """Steps on this disk that some rank does not have and never will."""
    passed: int = 0
    """Every step up to this one is on this disk, or never will be."""


def agreed(kept: Kept, held: Collection[int], *, keep: int, settled: int, gone: Collection[int]) -> Kept:
    """What is kept after the message of a watcher.

    Args:
        kept: Until now.
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
    """What is kept when a job goes on from a step: later ones belong to a future that it abandons."""
    settled = kept.settled if kept.settled <= resume_step else 0
    return Kept(settled, kept.promised if kept.promised <= resume_step else settled)


def steps_to_keep(held: Collection[int], kept: Kept, *, newest: int) -> set[int]:
    """The steps that stay; all others of ``held`` may go.

    Of those of which it is open whether all ranks will have them, the one that
    was asked for stays, then the roundest: what a slow disk gets is a part of
    what a faster one gets, and the rounder part.

    Args:
        held: Steps that all ranks of this machine have on disk.
        kept: What was reported and promised.
        newest: How many of the newest stay, ``disk_keep``.
    """
    still_open = [step for step in held if step > kept.settled and step not in kept.gone]
    likeliest_last = sorted(still_open, key=lambda step: (step == kept.named, roundness(step), step))
    return {kept.settled, kept.promised, *sorted(held)[-newest:], *likeliest_last[-OPEN_STEPS:]}
