"""This module has the type of a rule about one GPU, with its settings, the kept state and the problems it reports."""

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
    """Period, seconds (ByteRobust, table 3)."""
    deadline_s: float = Field(default=60.0, gt=0)
    """An inspection that takes longer is reported as hanging, seconds; it must be more than ``start_s``."""
    answer_s: float = Field(default=10.0, gt=0)
    """Longest wait for an answer of the driver, seconds."""
    start_s: float = Field(default=30.0, gt=0)
    """Longest wait for its first answer, when it may have to initialise all GPUs, seconds."""
    gpus: int | None = Field(default=None, ge=0)
    """Number of GPUs that there should be; by default the largest number that there ever was."""
    consecutive: int = Field(default=3, ge=1)
    """A state that may be temporary is a fault after this many consecutive inspections."""
    temperature_c: int | None = None
    """A GPU above this temperature is too hot, degrees Celsius; by default the limits of the device apply."""
    memory_temperature_c: int | None = None
    """Memory above this temperature is too hot, degrees Celsius; by default the limit of the device applies."""
    ecc_lasts_s: float = Field(default=24 * 3600.0, gt=0)
    """How long an uncorrected memory error stays active unless the GPU is reset before, seconds."""
    replays_per_minute: float = Field(default=8.0, ge=0)
    """Permitted repeated PCIe transmissions per minute (DCGM's limit)."""
    nvlink_errors_per_s: float = Field(default=100.0, ge=0)
    """From this rate on, checksum errors or repeated transmissions of an NVLink are a fault (DCGM's limit)."""
    link_errors_last_s: float = Field(default=600.0, gt=0)
    """How long a fault because of errors of a link stays active, seconds."""

    @model_validator(mode="after")
    def _look_outlasts_answer(self) -> Self:
        if self.deadline_s <= max(self.start_s, self.answer_s):
            raise ValueError("deadline_s must be more than start_s and answer_s, or each slow answer would be a hang")
        return self


class GpuKnown:
    """The state of one GPU that is kept from inspection to inspection, in JSON types.

    Args:
        kept: The result of ``kept`` at the previous inspection, perhaps of an earlier agent; empty: there was none.
    """

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self._counters: dict[str, int] = dict(kept.get("counters", {}))
        self._rows: dict[str, int] = dict(kept.get("rows", {}))
        self._links: set[int] = set(kept.get("links", []))
        self.seen_ns: int = kept.get("seen_ns", 0)
        """When the counters were read last, nanoseconds of the machine's clock; 0: never."""

    def kept(self) -> dict[str, Any]:
        """Return the state for the next inspection."""
        return {
            "counters": self._counters,
            "rows": {state: count for state, count in self._rows.items() if count},
            "links": sorted(self._links),
            "seen_ns": self.seen_ns,
        }

    def rose(self, counter: str, value: int | None) -> int | None:
        """Return by how much a counter rose since the last inspection, and keep its value for the next.

        Returns:
            None if that is not known: the counter was never read before, cannot be read, or went back because it was
            reset or overflowed.
        """
        if value is None:
            return None
        before = self._counters.get(counter)
        self._counters[counter] = value
        return None if before is None or value < before else value - before

    def went_back(self, counter: str, value: int | None) -> bool:
        """Return whether a counter is less than at the last inspection; to be called before ``rose``."""
        return value is not None and value < self._counters.get(counter, 0)

    def in_a_row(self, state: str, is_present: bool | None) -> int:
        """Count the consecutive inspections, up to this one, in which a state was present.

        Args:
            state: Name of the state.
            is_present: Whether it is present now; None: that is not known, and the count does not change.
        """
        if is_present is not None:
            self._rows[state] = self._rows.get(state, 0) + 1 if is_present else 0
        return self._rows.get(state, 0)

    def links_up(self, up: Collection[int]) -> set[int]:
        """Return the NVLinks that were up at this inspection or an earlier one."""
        self._links |= set(up)
        return self._links


@dataclass(frozen=True, slots=True)
class GpuProblem:
    """A problem of a GPU, or of all GPUs."""

    reason: Reason
    text: str
    evidence: str = ""
    lasts_s: float = 0.0
    """How long the problem stays active if it is an event, seconds; 0: it is a current state."""


GpuRule = Callable[[GpuReading, GpuKnown, GpuLimits, float], Iterator[GpuProblem]]
"""A rule about one GPU that could be read.

Its arguments are the reading, the kept state of the GPU, which the rule updates, the thresholds, and the seconds since
the previous reading of the GPU (0: there was none).
"""
