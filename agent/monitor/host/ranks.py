"""This module inspects the processes of ranks: whether the kernel killed one, and whether one is blocked or stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits, RankSeen
from everstep.model.finding import Finding, Health, Owner, Reason, Remedy
from everstep.system.memory import oom_kills
from everstep.system.procfs import process_of

OOM_KILLS = Reason(
    "oom-kill-counted",
    "the kernel killed processes because the agent's cgroup has used up its memory",
    Owner.CODE,
    Remedy.CHECK_CODE,
    Health.UNKNOWN,
    source="ByteRobust, table 1, has it as a symptom",
)
WAITING = Reason(
    "rank-waits-in-kernel",
    "a rank is blocked in the kernel, e.g. by a disk, a mount or a driver",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
)
STOPPED = Reason(
    "rank-stopped",
    "a rank is stopped, e.g. by SIGSTOP or a debugger",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
)


class RanksLimits(Limits):
    """Thresholds for ranks."""

    waits_s: float = Field(default=30.0, gt=0)
    """A rank is reported if all inspections for this long, seconds, see it blocked in the kernel or stopped."""
    lasts_s: float = Field(default=600.0, gt=0)
    """How long the finding that the kernel killed processes stays active, seconds."""


class RanksInspection(Inspection):
    """Inspects state, CPU time and memory of each rank that the agent started. How ranks end is reported elsewhere."""

    name: ClassVar[str] = "ranks"
    inspects: ClassVar[str] = "ranks: killed for memory, blocked in the kernel, stopped; their CPU time and memory"
    reasons: ClassVar[tuple[Reason, ...]] = (OOM_KILLS, WAITING, STOPPED)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("rank_cpu_seconds_total", "job rank", "CPU time of a rank's process"),
        ("rank_resident_memory_bytes", "job rank", "its memory"),
    )
    limits_type: ClassVar[type[Limits]] = RanksLimits

    def __init__(self, site: Any, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        super().__init__(site, limits, kept, same_boot=same_boot)
        self._since: dict[tuple[int, str], float] = {}
        """Process and state → since when the process is in that state, seconds of the monotonic clock."""

    def inspect(self) -> InspectionResult:
        """Read the state of each rank's process."""
        now_ns = self.site.now_ns()
        result = InspectionResult()
        self._note_kills(now_ns)
        result.findings += self.noted()
        ranks = [rank for rank in self.site.ranks() if rank.alive]
        since, now = self._since, time.monotonic()
        self._since = {}
        for rank in ranks:
            process = process_of(rank.pid, self.site.proc)
            if process is None:
                continue  # it has just ended
            state = process.state
            label = f'{{job="{rank.job}",rank="{rank.rank}"}}'
            result.measures[f"rank_cpu_seconds_total{label}"] = process.cpu_s
            result.measures[f"rank_resident_memory_bytes{label}"] = float(process.resident_bytes)
            if state in "DtT":
                key = (rank.pid, "D" if state == "D" else "T")
                self._since[key] = since.get(key, now)
                result.findings += self._blocked(rank, key[1], now - self._since[key])
        return result

    def _blocked(self, rank: RankSeen, state: str, seconds: float) -> list[Finding]:
        if seconds < self.limits.waits_s:
            return []
        reason = WAITING if state == "D" else STOPPED
        item, evidence = f"rank {rank.rank} of {rank.job}", f"process {rank.pid} is in state {state}"
        since_ns = self.site.now_ns() - round(seconds * 1e9)
        return [self.finding(reason, item, evidence, since_ns=since_ns)]

    def _note_kills(self, now_ns: int) -> None:
        kills = oom_kills()
        if kills is None:
            return
        rose = kills - self.kept.get("kills", kills)
        self.kept["kills"] = kills
        if rose > 0:
            found = self.finding(OOM_KILLS, "", f"{rose} killed", text=f"the kernel killed {rose} for memory")
            self.note(found, at_ns=now_ns, lasts_s=self.limits.lasts_s)
