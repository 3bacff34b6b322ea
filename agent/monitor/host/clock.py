"""The machine's wall clock."""

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
    "the kernel does not know the wall clock to be right, and did earlier",
    Owner.MACHINE,
    Remedy.CHECK_SETUP,
    Health.UNKNOWN,
)
NOT_SYNCED = 0x0040
"""STA_UNSYNC, a bit of ``status``."""


class _Timex(ctypes.Structure):
    """``struct timex`` of Linux, as far as it is read; the rest is room."""

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
    """Whether the kernel knows its clock to be right, by a time service.

    Raises:
        OSError: it does not say.
    """
    state = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex failed")
    return not state.status & NOT_SYNCED


class ClockLimits(Limits):
    """Thresholds for the clock."""

    jump_s: float = Field(default=1.0, gt=0)
    """Moved by more than this between two looks it was set."""
    lasts_s: float = Field(default=600.0, gt=0)
    """That it was set counts for this long."""


class ClockInspection(Inspection):
    """Whether the wall clock runs with the monotonic one, and whether a time service holds it."""

    name: ClassVar[str] = "clock"
    inspects: ClassVar[str] = "the wall clock: set, or no longer held by a time service"
    reasons: ClassVar[tuple[Reason, ...]] = (JUMPED, UNSYNCED)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("clock_synced", "", "1: the kernel knows its wall clock to be right")
    )
    limits_type: ClassVar[type[Limits]] = ClockLimits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {UNSYNCED.code: ("was_synced",)}
    synced: Callable[[], bool] = staticmethod(is_synced)

    def __init__(self, site: Any, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        super().__init__(site, limits, kept, same_boot=same_boot)
        self._ahead_ns: int | None = None

    def inspect(self) -> InspectionResult:
        """Compare the clocks."""
        # Suspended machines: CLOCK_BOOTTIME goes on while they sleep, as the wall clock does.
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
