"""The errors that a damaged or malicious file of another tool causes in its reader, and the check of a rank's
number."""

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
"""Each of these errors means that the file cannot be read."""
MOST_RANKS = 1 << 20
"""This number, or a larger one, is not a rank, but for example a date or a process id."""


def rank_number(value: Any) -> int:
    """Read the number of a rank.

    Raises:
        ValueError: the value cannot be the number of a rank.
        TypeError: the value is not a number.
        OverflowError: the value is infinite.
    """
    rank = int(value)
    if not 0 <= rank < MOST_RANKS:
        raise ValueError(f"{rank} is not a rank: ranks are numbered from 0 to {MOST_RANKS - 1} at most")
    return rank
