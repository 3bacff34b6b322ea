"""What a rule about one GPU is, what it gets, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, model_validator

from agent.monitor.gpu.reading import GpuReading
from agent.monitor.inspection import Limits
from everstep.model.finding import Reason


class GpuLimits(Limits):
    """Thresholds for GPUs."""

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
    consecutive: int = Field(default=3, ge=1)
    """What may be so for a moment is a fault when this many looks saw it one after the other."""
    temperature_c: int | None = None
    """A GPU that is hotter is too hot, degrees Celsius; by default its own limits hold."""
    memory_temperature_c: int | None = None
    """Memory that is hotter is too hot, degrees Celsius; by default its own limit holds."""
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


class GpuKnown:
    """What is known of one GPU from earlier inspections; read and written as JSON.

    Args:
        kept: As ``kept`` gave it, of an earlier look or an earlier agent; empty: nothing is known.
    """

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self._counters: dict[str, int] = dict(kept.get("counters", {}))
        self._rows: dict[str, int] = dict(kept.get("rows", {}))
        self._links: set[int] = set(kept.get("links", []))
        self.seen_ns: int = kept.get("seen_ns", 0)
        """When the counters were read last, by the machine's clock; 0: never."""

    def kept(self) -> dict[str, Any]:
        """All of it."""
        return {
            "counters": self._counters,
            "rows": {what: count for what, count in self._rows.items() if count},
            "links": sorted(self._links),
            "seen_ns": self.seen_ns,
        }

    def rose(self, counter: str, value: int | None) -> int | None:
        """By how much a counter rose since the last look, which is then its baseline.

        Returns:
            None where nothing can be concluded: it is read for the first time, cannot be read, or went back, as after a
            reset or where it wrapped.
        """
        if value is None:
            return None
        before = self._counters.get(counter)
        self._counters[counter] = value
        return None if before is None or value < before else value - before

    def went_back(self, counter: str, value: int | None) -> bool:
        """Whether a counter is less than at the last look. Ask before ``rose``."""
        return value is not None and value < self._counters.get(counter, 0)

    def in_a_row(self, what: str, so: bool | None) -> int:
        """How many looks saw something one after the other, this one too; None: this one does not say."""
        if so is not None:
            self._rows[what] = self._rows.get(what, 0) + 1 if so else 0
        return self._rows.get(what, 0)

    def links_up(self, up: Collection[int]) -> set[int]:
        """The NVLinks that were up in this look or an earlier one."""
        self._links |= set(up)
        return self._links


@dataclass(frozen=True, slots=True)
class GpuProblem:
    """A problem of a GPU, or of all GPUs."""

    reason: Reason
    text: str
    evidence: str = ""
    lasts_s: float = 0.0
    """It happened once and counts for this long; 0: it is so now."""


GpuRule = Callable[[GpuReading, GpuKnown, GpuLimits, float], Iterator[GpuProblem]]
"""A rule about one GPU that could be read.

Args: the reading; what is known of the GPU, which is brought up to date; the thresholds; seconds since the last look
that read it, 0 where there was none.
"""
