"""By which rules an incident goes: those of the release on which it began."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Release:
    """Mutable; incidents that began on an earlier release have False where they go by its rules."""

    judges_progress: bool = True
    """What is solved is judged by steady progress."""
    counts_apart: bool = True
    """What was tried for faults of unknown cause says nothing of those whose cause is known."""
    counts_unknown: bool = True
    """Nor the other way round in the same incident."""
    tests_hints: bool = True
    """A machine that an inspection does not name for sure is to be tested."""
