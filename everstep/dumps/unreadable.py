"""What reading a file of another tool raises where it is cut off, or was made to break a reader."""

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
"""All of these mean that the file is not what it is taken for."""
MOST_RANKS = 1 << 20
"""A number from here on is none of a rank, but a date or a process."""


def rank_number(value: Any) -> int:
    """A number as that of a rank.

    Raises:
        ValueError: it cannot be one.
        TypeError: it is no number.
        OverflowError: it is infinite.
    """
    rank = int(value)
    if not 0 <= rank < MOST_RANKS:
        raise ValueError(f"rank {rank} is none: ranks are numbered from 0 to {MOST_RANKS - 1} at most")
    return rank
