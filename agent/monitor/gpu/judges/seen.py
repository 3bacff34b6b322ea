"""What a judge says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent.monitor.gpu.known import GpuKnown
from agent.monitor.gpu.limits import GpuLimits
from agent.monitor.gpu.reading import GpuReading
from everstep.model.finding import Reason


@dataclass(frozen=True, slots=True)
class GpuSeen:
    """One thing that is wrong with a GPU, or with all."""

    reason: Reason
    text: str
    evidence: str = ""
    lasts_s: float = 0.0
    """It happened once and counts for this long; 0: it is so now."""


GpuJudge = Callable[[GpuReading, GpuKnown, GpuLimits, float], Iterator[GpuSeen]]
"""Judges one GPU that could be read.

Args: the reading; what is known of the GPU, which is brought up to date; the thresholds; seconds since the last look
that read it, 0 where there was none.
"""
