"""This module inspects the machine's wall clock."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits
from everstep.model.finding import Health, Owner, Reason, Remedy

JUMPED = Reason(
    "clock-jumped",
    "the wall clock was set",
    Owner.MACHINE,
    Remedy.WATCH,
    Health.UNKNOWN,
)
UNSYNCED = Reason(
    "clock-unsynced",
    "a time service no longer synchronizes the wall clock",
    Owner.MACHINE,
    Remedy.CHECK_SETUP,
    Health.UNKNOWN,
)
NOT_SYNCED = 0x0040
"""STA_UNSYNC, a bit of ``status``."""


class _Timex(ctypes.Structure):
    """The fields of Linux' ``struct timex`` that are read; ``room`` is the space for all others."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_char * 256),
    )


def is_synced() -> bool:
    """Return whether a time service synchronizes the kernel's wall clock.

    Raises:
        OSError: the kernel does not report it.
    """
    state = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex failed")
    return not state.status & NOT_SYNCED


class ClockLimits(Limits):
    """Thresholds for the clock."""

    jump_s: float = Field(default=1.0, gt=0)
    """The clock was set if it moved by more than this between two inspections, seconds."""
    lasts_s: float = Field(default=600.0, gt=0)
    """How long the finding that it was set stays active, seconds."""


class ClockInspection(Inspection):
    """Inspects whether the wall clock was set, and whether a time service synchronizes it."""

    name: ClassVar[str] = "clock"
    inspects: ClassVar[str] = "the wall clock: set, or no longer synchronized"
    reasons: ClassVar[tuple[Reason, ...]] = (JUMPED, UNSYNCED)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("clock_synced", "", "1 if a time service synchronizes the wall clock")
    )
    limits_type: ClassVar[type[Limits]] = ClockLimits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {UNSYNCED.code: ("was_synced",)}
    synced: Callable[[], bool] = staticmethod(is_synced)

    def __init__(self, site: Any, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        super().__init__(site, limits, kept, same_boot=same_boot)
        self._ahead_ns: int | None = None

    def inspect(self) -> InspectionResult:
        """Compare the wall clock with the time since boot."""
        # CLOCK_BOOTTIME also runs while a machine is suspended, as the wall clock does.
        now_ns = self.site.now_ns()
        ahead_ns = now_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        moved_s = 0.0 if self._ahead_ns is None else (ahead_ns - self._ahead_ns) / 1e9
        self._ahead_ns = ahead_ns
        if abs(moved_s) > self.limits.jump_s:
            text = f"the wall clock was set by {moved_s:+.1f} s"
            self.note(self.finding(JUMPED, "", text, text=text), at_ns=now_ns, lasts_s=self.limits.lasts_s)
        findings = self.noted()
        synced = self.synced()
        self.kept["was_synced"] = synced or self.kept.get("was_synced", False)
        if self.kept["was_synced"] and not synced:
            findings.append(self.finding(UNSYNCED))
        return InspectionResult(findings, {"clock_synced": float(synced)})
