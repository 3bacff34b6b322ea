"""Entries of copies, one for each rank, so that tests can name single copies."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.model.places import Places
from everstep.model.state_copy import StateCopies


def singles(copies: Iterable[StateCopies]) -> list[StateCopies]:
    """Return one entry for each copy of a rank, in the order of ranks."""
    found = [
        entry.changed(places=Places({machine: str(rank)}))
        for entry in copies
        for machine, spans in entry.places.each()
        for first, last in spans
        for rank in range(first, last + 1)
    ]
    return sorted(found, key=lambda one: one.ranks.first)


def named(copies: Iterable[StateCopies]) -> list[tuple[int, str]]:
    """Return the rank and the machine of each copy, in the order of ranks."""
    return [(one.ranks.first, one.machine) for one in singles(copies)]
