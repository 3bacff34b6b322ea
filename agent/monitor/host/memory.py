"""The memory of the machine."""

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
    "memory is nearly used up: the kernel will kill a process soon",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
)
LOST = Reason("memory-lost", "the machine has less memory than it had: a module may have failed", remedy=Remedy.REPLACE)


class MemoryLimits(Limits):
    """Thresholds for memory."""

    available_share: float = Field(default=0.02, ge=0, le=1)
    """Less of it available than this share is low."""
    lost_share: float = Field(default=0.03, gt=0, le=1)
    """It has lost memory where it has less by this share than it once had (kernels of other releases keep
    different amounts for themselves)."""


class MemoryInspection(Inspection):
    """How much there is, and how much of it can still be used, by the machine and within the agent's cgroup."""

    name: ClassVar[str] = "memory"
    inspects: ClassVar[str] = "memory that is there, and that may still be used"
    reasons: ClassVar[tuple[Reason, ...]] = (LOW, LOST)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("memory_total_bytes", "", "memory of the machine"),
        ("memory_available_bytes", "", "what may still be used, also within the agent's cgroup"),
        ("memory_stalled_ratio", "", "share of the last minute in which all processes waited for memory"),
    )
    limits_type: ClassVar[type[Limits]] = MemoryLimits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {LOST.code: ("most",)}

    def after_reboot(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """A module fails at a start as well: what there was is remembered."""
        return dict(kept)

    def inspect(self) -> InspectionResult:
        """Read the kernel's table."""
        table = meminfo(self.site.proc)
        total, available = table["MemTotal"], min(table["MemAvailable"], memory_available())
        most = self.kept["most"] = max(total, self.kept.get("most", 0))
        waiting = pressure("memory", self.site.proc)
        findings = []
        if available < self.limits.available_share * total:
            seen = f"{size_text(available)} of {size_text(total)} available"
            findings.append(self.finding(LOW, "", seen, text=f"memory is nearly used up: {seen}"))
        if total < (1 - self.limits.lost_share) * most:
            seen = f"{size_text(total)}, and it had {size_text(most)}"
            findings.append(self.finding(LOST, "", seen, text=f"the machine has less memory than it had: {seen}"))
        measures = {
            "memory_total_bytes": float(total),
            "memory_available_bytes": float(available),
            "memory_stalled_ratio": waiting.get("full avg60", 0.0) / 100,
        }
        return InspectionResult(findings, measures, {"memory": size_text(total)})
