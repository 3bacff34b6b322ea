"""Two machines, whichever is named first."""

from __future__ import annotations

Pair = tuple[str, str]
"""In alphabetical order."""


def pair_of(one: str, other: str) -> Pair:
    """Of two machines."""
    return (one, other) if one <= other else (other, one)
