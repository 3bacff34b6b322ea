"""This module inspects the machine's main memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits
from everstep.base.text import size_text
from everstep.model.finding import Health, Owner, Reason, Remedy
from everstep.system.memory import memory_available
from everstep.system.procfs import meminfo, pressure

LOW = Reason(
    "memory-low",
    "memory is nearly used up, so the kernel may soon kill a process",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
)
LOST = Reason("memory-lost", "the machine has less memory than before: a module may have failed", remedy=Remedy.REPLACE)


class MemoryLimits(Limits):
    """Thresholds for memory."""

    available_share: float = Field(default=0.02, ge=0, le=1)
    """A smaller share of available memory is low."""
    lost_share: float = Field(default=0.03, gt=0, le=1)
    """The machine has lost memory if it has less than before by more than this share. Smaller differences come from
    kernels of different releases, which reserve different amounts."""


class MemoryInspection(Inspection):
    """Inspects how much memory the machine has, and how much of it is available."""

    name: ClassVar[str] = "memory"
    inspects: ClassVar[str] = "memory: its size, and how much is available"
    reasons: ClassVar[tuple[Reason, ...]] = (LOW, LOST)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("memory_total_bytes", "", "memory of the machine"),
        ("memory_available_bytes", "", "memory that may still be used, also within the agent's cgroup"),
        ("memory_stalled_ratio", "", "share of the last minute in which all processes waited for memory"),
    )
    limits_type: ClassVar[type[Limits]] = MemoryLimits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {LOST.code: ("most",)}

    def after_reboot(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the size of the memory, since a module may fail during a reboot."""
        return dict(kept)

    def inspect(self) -> InspectionResult:
        """Read the kernel's table of memory."""
        table = meminfo(self.site.proc)
        total, available = table["MemTotal"], min(table["MemAvailable"], memory_available())
        most = self.kept["most"] = max(total, self.kept.get("most", 0))
        waiting = pressure("memory", self.site.proc)
        findings = []
        if available < self.limits.available_share * total:
            seen = f"{size_text(available)} of {size_text(total)} available"
            findings.append(self.finding(LOW, "", seen, text=f"memory is nearly used up: {seen}"))
        if total < (1 - self.limits.lost_share) * most:
            seen = f"{size_text(total)}, {size_text(most)} before"
            findings.append(self.finding(LOST, "", seen, text=f"the machine has less memory than before: {seen}"))
        measures = {
            "memory_total_bytes": float(total),
            "memory_available_bytes": float(available),
            "memory_stalled_ratio": waiting.get("full avg60", 0.0) / 100,
        }
        return InspectionResult(findings, measures, {"memory": size_text(total)})
