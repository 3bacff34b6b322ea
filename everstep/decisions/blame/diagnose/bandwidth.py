"""Which bandwidths are far below those of others that were measured in the same way.

The thresholds are ours: the papers compare with what is expected, and say no numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import median
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
LEAST = 3
"""Fewer figures than this are not compared."""
LOW_SHARE = 0.5
"""Less than this share of the median is worth a look …"""
SLOW_SHARE = 0.2
"""… and less than this is a fault: machines that other work disturbs do not fall that far."""


def below(figures: Mapping[K, float], share: float) -> dict[K, float]:
    """Those below a share of the median of all, with which share of it they have.

    Args:
        figures: Bandwidths of what is alike.
        share: Of the median, above 0 and below 1.
    """
    if len(figures) < LEAST:
        return {}
    usual = median(figures.values())
    return {one: value / usual for one, value in figures.items() if value < share * usual}
