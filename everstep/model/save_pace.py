"""Defines the pace of a rank: after how many steps it saves. Ranks import it, so it needs the standard library only."""

from __future__ import annotations

from typing import NamedTuple


class SavePace(NamedTuple):
    """After how many steps a rank saves (``everstep/decisions/keep/save_pace.py``)."""

    number: int = 0
    """Number of moves of this generation before this pace."""
    every: int = 1
    """The rank saves after the steps that are multiples of this number."""
    waits: bool = False
    """Whether training waits until each save is committed."""
