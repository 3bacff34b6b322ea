"""This module inspects the free space on file systems that the machine and its jobs write to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.inspection import Inspection, InspectionResult, Limits
from everstep.base.text import size_text
from everstep.model.finding import Finding, Reason, Remedy

FULL = Reason(
    "disk-full",
    "a file system is full",
    remedy=Remedy.FREE_SPACE,
    source="ByteRobust, table 1, has it as a symptom",
)
NO_FILES_LEFT = Reason("disk-full-of-files", "a file system has no more room for files", remedy=Remedy.FREE_SPACE)


class DiskSpaceLimits(Limits):
    """Thresholds for free space."""

    interval_s: float = Field(default=2.0, gt=0)
    free_share: float = Field(default=0.02, ge=0, le=1)
    """A file system with a smaller share of free space is full."""
    free_files_share: float = Field(default=0.01, ge=0, le=1)
    """A file system with a smaller share of free inodes is full."""
    paths: list[str] = Field(default_factory=lambda: ["/", "/tmp"])
    """Folders whose file systems are inspected, besides the agent's state folder and its checkpoints. Those that do not
    exist are ignored."""


class DiskSpaceInspection(Inspection):
    """Inspects the free space of file systems, but not of shared memory, because checkpoints fill it on purpose."""

    name: ClassVar[str] = "disk-space"
    inspects: ClassVar[str] = "free space on file systems"
    reasons: ClassVar[tuple[Reason, ...]] = (FULL, NO_FILES_LEFT)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("filesystem_avail_bytes", "path", "free space of the file system of a folder"),
        ("filesystem_size_bytes", "path", "its size"),
    )
    limits_type: ClassVar[type[Limits]] = DiskSpaceLimits

    def inspect(self) -> InspectionResult:
        """Read the free space of each file system once."""
        seen: set[int] = set()
        result = InspectionResult()
        own = self.site.state_dir
        for path in (own, own / "checkpoints", *map(Path, self.limits.paths)):
            try:
                device, space = path.stat().st_dev, os.statvfs(path)
            except FileNotFoundError:
                continue
            if device in seen or not space.f_blocks:
                continue
            seen.add(device)
            result.findings += self._judged(path, space)
            label = f'{{path="{path}"}}'
            result.measures[f"filesystem_avail_bytes{label}"] = float(space.f_bavail * space.f_frsize)
            result.measures[f"filesystem_size_bytes{label}"] = float(space.f_blocks * space.f_frsize)
        return result

    def _judged(self, path: Path, space: os.statvfs_result) -> list[Finding]:
        found = []
        free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        if free < self.limits.free_share * size:
            text = f"{size_text(free)} of {size_text(size)} free"
            found.append(self.finding(FULL, str(path), text, text=f"the file system is full: {text}"))
        if space.f_files and space.f_favail < self.limits.free_files_share * space.f_files:
            text = f"{space.f_favail} of {space.f_files} files left"
            found.append(self.finding(NO_FILES_LEFT, str(path), text, text=f"{NO_FILES_LEFT.means}: {text}"))
        return found
