"""Thresholds of the inspection of GPUs."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from agent.monitor.inspection import Limits


class GpuLimits(Limits):
    """Of GPUs."""

    interval_s: float = Field(default=10.0, gt=0)
    """From one look to the next, seconds (ByteRobust, table 3)."""
    deadline_s: float = Field(default=60.0, gt=0)
    """A look that takes longer is said to hang; more than ``start_s``."""
    answer_s: float = Field(default=10.0, gt=0)
    """The driver has this long to answer, seconds …"""
    start_s: float = Field(default=30.0, gt=0)
    """… and this long the first time, when it may have to initialise all GPUs."""
    gpus: int | None = Field(default=None, ge=0)
    """How many there should be; by default as many as there once were."""
    looks: int = Field(default=3, ge=1)
    """What may be so for a moment is a fault when this many looks saw it one after the other."""
    temperature_c: int | None = None
    """A GPU that is hotter is too hot, degrees Celsius; by default its own limits hold."""
    memory_temperature_c: int | None = None
    """The same of its memory."""
    ecc_lasts_s: float = Field(default=24 * 3600.0, gt=0)
    """An uncorrected memory error counts for this long, or until the GPU is reset."""
    replays_per_minute: float = Field(default=8.0, ge=0)
    """More repeated PCIe transmissions are too many (DCGM's limit)."""
    nvlink_errors_per_s: float = Field(default=100.0, ge=0)
    """As many NVLink checksum errors, or repeated transmissions, are too many (DCGM's limit for checksums)."""
    link_errors_last_s: float = Field(default=600.0, gt=0)
    """Too many errors of a link count for this long."""

    @model_validator(mode="after")
    def _look_outlasts_answer(self) -> Self:
        if self.deadline_s <= max(self.start_s, self.answer_s):
            raise ValueError("deadline_s must be more than start_s and answer_s, or each slow answer would be a hang")
        return self
