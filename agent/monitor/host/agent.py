"""This module inspects the agent itself."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits
from everstep.model.finding import Reason, Remedy
from everstep.system import procfs

STATE_FOLDER = Reason("state-folder", "the agent's state folder cannot be written", remedy=Remedy.FREE_SPACE)
FILES = Reason("agent-files", "the agent has nearly as many open files as it may have", remedy=Remedy.CHECK_SETUP)


class AgentLimits(Limits):
    """Thresholds for the agent itself."""

    files_share: float = Field(default=0.9, gt=0, le=1)
    """A larger share of the permitted open files is too much."""


class AgentInspection(Inspection):
    """Inspects whether the agent can do its work, and measures the resources that it uses."""

    name: ClassVar[str] = "agent"
    inspects: ClassVar[str] = "the agent: its state folder, files, memory, CPU time"
    reasons: ClassVar[tuple[Reason, ...]] = (STATE_FOLDER, FILES)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("process_cpu_seconds_total", "", "CPU time of the agent"),
        ("process_resident_memory_bytes", "", "its memory"),
        ("process_open_fds", "", "its open files"),
        ("process_threads", "", "its threads"),
    )
    limits_type: ClassVar[type[Limits]] = AgentLimits

    def inspect(self) -> InspectionResult:
        """Inspect this process."""
        findings = []
        if problem := self.site.disk_problem():
            findings.append(self.finding(STATE_FOLDER, "", problem, text=f"the state folder: {problem}"))
        files = len(procfs.own_descriptors())
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if allowed != resource.RLIM_INFINITY and files > self.limits.files_share * allowed:
            findings.append(self.finding(FILES, "", f"{files} of {allowed} files are open"))
        process = procfs.process_of(os.getpid())
        measures = {
            "process_cpu_seconds_total": time.process_time(),
            "process_resident_memory_bytes": float(process.resident_bytes if process else 0),
            "process_open_fds": float(files),
            "process_threads": float(threading.active_count()),
        }
        return InspectionResult(findings, measures)
