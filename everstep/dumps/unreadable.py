"""The errors of reading a file of another tool that is cut off, or was made to break a reader."""

from __future__ import annotations

from typing import Any

UNREADABLE: tuple[type[Exception], ...] = (
    ArithmeticError,  # 1e999 as a number
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,  # brackets within brackets
    TypeError,
    ValueError,
)
"""All of these mean that the file cannot be read."""
MOST_RANKS = 1 << 20
"""Numbers from here on are no ranks, but dates or processes."""


def rank_number(value: Any) -> int:
    """Read a number of a rank.

    Raises:
        ValueError: it cannot be the number of a rank.
        TypeError: it is no number.
        OverflowError: it is infinite.
    """
    rank = int(value)
    if not 0 <= rank < MOST_RANKS:
        raise ValueError(f"rank {rank} is none: ranks are numbered from 0 to {MOST_RANKS - 1} at most")
    return rank
