"""This module inspects the machine's processors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits
from everstep.model.finding import Health, Owner, Reason, Remedy
from everstep.system.procfs import pressure

OVERLOADED = Reason(
    "cpu-overload",
    "processes wait for processors",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
    source="ByteRobust, table 1, has it as a symptom",
)
LOST = Reason("cpu-lost", "the machine has fewer processors than before", remedy=Remedy.REPLACE)
HOT = Reason("cpu-hot", "a processor runs slower because it is too hot", remedy=Remedy.REPLACE, verdict=Health.UNKNOWN)


class CpuLimits(Limits):
    """Thresholds for processors."""

    interval_s: float = Field(default=10.0, gt=0)
    waiting_share: float = Field(default=0.6, gt=0, le=1)
    """The machine is overloaded if some process waited for a processor during this share of the last five minutes."""
    hot_lasts_s: float = Field(default=600.0, gt=0)
    """How long the finding that a processor was too hot stays active, seconds."""


class CpuInspection(Inspection):
    """Inspects whether processors are missing, overloaded or too hot."""

    name: ClassVar[str] = "cpu"
    inspects: ClassVar[str] = "processors: missing, overloaded, too hot"
    reasons: ClassVar[tuple[Reason, ...]] = (OVERLOADED, LOST, HOT)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("cpu_online", "", "processors that are online"),
        ("cpu_waiting_ratio", "", "share of the last 5 minutes in which some process waited for a processor"),
        ("load1", "", "load average of a minute"),
    )
    limits_type: ClassVar[type[Limits]] = CpuLimits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {LOST.code: ("most",)}

    def after_reboot(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the number of processors; the counters of throttling begin anew."""
        return {"most": kept["most"]} if "most" in kept else {}

    def inspect(self) -> InspectionResult:
        """Read the number of processors, their load and their counters of throttling."""
        now_ns = self.site.now_ns()
        online = os.sysconf("SC_NPROCESSORS_ONLN")
        most = self.kept["most"] = max(online, self.kept.get("most", 0))
        waiting = pressure("cpu", self.site.proc).get("some avg300", 0.0) / 100
        findings = []
        if waiting >= self.limits.waiting_share:
            seen = f"some process waited for a processor {waiting:.0%} of the last 5 minutes"
            findings.append(self.finding(OVERLOADED, "", seen, text=seen))
        if online < most:
            seen = f"{online} of {most} processors are online"
            findings.append(self.finding(LOST, "", seen, text=seen))
        self._heat(now_ns)
        findings += self.noted()
        load = os.getloadavg()[0]
        measures = {"cpu_online": float(online), "cpu_waiting_ratio": waiting, "load1": load}
        return InspectionResult(findings, measures, {"processors": str(online)})

    def _heat(self, now_ns: int) -> None:
        """Note each package that was throttled since the last inspection."""
        known, counts = self.kept.get("throttled", {}), {}
        for file in sorted(self.site.sys.glob("devices/system/cpu/cpu*/thermal_throttle/package_throttle_count")):
            cpu = file.parent.parent
            try:
                package = (cpu / "topology/physical_package_id").read_text().strip()
                if package in counts:
                    continue
                counts[package] = int(file.read_text())
            except (OSError, ValueError):
                continue
            rose = counts[package] - known.get(package, counts[package])
            if rose > 0:
                found = self.finding(HOT, f"processor {package}", f"slowed down {rose} times", since_ns=now_ns)
                self.note(found, at_ns=now_ns, lasts_s=self.limits.hot_lasts_s)
        self.kept["throttled"] = counts
