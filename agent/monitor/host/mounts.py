"""This module inspects file systems: whether they are mounted and writable, and whether they answer."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.host.own_mounts import needed_points
from agent.monitor.inspection import Inspection, InspectionResult, Limits, of_no_job
from everstep.errors import CannotInspect
from everstep.model.finding import Health, Owner, Reason, Remedy
from everstep.system.procfs import Mount, mounts

READ_ONLY = Reason(
    "fs-readonly",
    "a file system has become read-only",
    remedy=Remedy.REPLACE,
    sure=True,
    source="ByteRobust, figure 5, step 1: a disk fault",
)
MISSING = Reason(
    "mount-missing",
    "a required file system is not mounted",
    Owner.STORAGE,
    Remedy.CHECK_SETUP,
    source="ByteRobust, table 1, has it as a symptom",
)
HANGS = Reason(
    "mount-hangs",
    "a file system does not answer",
    Owner.STORAGE,
    Remedy.WATCH,
    Health.UNKNOWN,
    source="ByteRobust, table 1, has it as a symptom",
)
NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "beegfs", "gpfs", "glusterfs"),
        *("fuse.glusterfs", "fuse.s3fs", "fuse.mount-s3", "fuse.juicefs"),
    }
)
"""Kinds of file systems on other machines."""
OPEN_REQUESTS = 64
"""Largest number of file systems that are waited for at the same time."""
_ESCAPED = re.compile(rb"\\([0-3][0-7]{2})")
PSEUDO = frozenset(
    {
        *("proc", "sysfs", "cgroup", "cgroup2", "devpts", "devtmpfs", "mqueue", "securityfs", "debugfs", "tracefs"),
        *("bpf", "autofs", "hugetlbfs", "pstore", "configfs", "fusectl", "binfmt_misc", "rpc_pipefs", "nsfs"),
        *("efivarfs", "ramfs", "squashfs", "iso9660", "overlay"),
    }
)
"""Kinds of file systems that are not inspected: virtual, read-only, or used by containers."""


class MountsLimits(Limits):
    """Required file systems, and how fast they have to answer."""

    answer_s: float = Field(default=10.0, gt=0)
    """A network file system that does not answer within this time hangs, seconds."""
    required: list[str] = Field(default_factory=list)
    """Mount points that must be mounted. Others may be unmounted at any time, as volumes and home folders are."""


class MountsInspection(Inspection):
    """Compares the table of mounts with the previous one, and checks that network file systems answer."""

    name: ClassVar[str] = "mounts"
    inspects: ClassVar[str] = "file systems: mounted, writable, answering"
    reasons: ClassVar[tuple[Reason, ...]] = (READ_ONLY, MISSING, HANGS)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("mounts", "", "file systems that are mounted and inspected")
    )
    limits_type: ClassVar[type[Limits]] = MountsLimits
    baselines: ClassVar[Mapping[str, tuple[str, ...]]] = {READ_ONLY.code: ("writable",)}

    def __init__(self, site: Any, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        super().__init__(site, limits, kept, same_boot=same_boot)
        self._requests: dict[str, _Request] = {}

    def inspect(self) -> InspectionResult:
        """Read the table of mounts."""
        table = mounts(self.site.proc)
        now = {point: mount for point, mount in table.items() if self._is_inspected(mount)}
        needed = needed_points(self.site, table, self.limits.required)
        was_writable = set(self.kept.get("writable", []))
        result = InspectionResult(measures={"mounts": float(len(now))})
        for point in sorted(was_writable & now.keys()):
            if not now[point].writable:
                found = self.finding(READ_ONLY, point, f"{now[point].source} ({now[point].kind})")
                result.findings.append(found if point in needed else of_no_job(found))
        for point in sorted(set(self.limits.required) - now.keys()):
            result.findings.append(self.finding(MISSING, point))
        for point, mount in sorted(now.items()):
            if mount.kind in NETWORK and (silent_s := self._silent_s(point)):
                text = f"the file system has not answered for {silent_s:.0f} s"
                result.findings.append(self.finding(HANGS, point, f"{mount.source} ({mount.kind})", text=text))
        self.kept = {
            # A file system that was unmounted is no longer expected to be writable.
            "writable": sorted((was_writable & now.keys()) | {point for point, mount in now.items() if mount.writable}),
        }
        return result

    def _is_inspected(self, mount: Mount) -> bool:
        """Return whether a file system is inspected: it is on a disk or on the network, or it is needed or required."""
        if mount.kind in PSEUDO or self.site.is_of_other_agent(Path(mount.point)):
            return False
        needed = mount.point in self.limits.required or Path(mount.point).is_relative_to(self.site.state_dir)
        return needed or mount.kind in NETWORK or mount.source.startswith("/dev/")

    def _silent_s(self, point: str) -> float:
        """Return for how many seconds a file system has not answered; 0: within the limit. This does not wait."""
        request = self._requests.get(point)
        if request is None or request.answered:
            self._requests = {point: request for point, request in self._requests.items() if not request.answered}
            if len(self._requests) >= OPEN_REQUESTS:
                raise CannotInspect(f"{OPEN_REQUESTS} file systems do not answer")
            request = self._requests[point] = _Request(point)
        silent_s = time.monotonic() - request.since
        return silent_s if not request.answered and silent_s > self.limits.answer_s else 0.0


class _Request:
    """A request to a file system, in a thread of its own, which may hang for ever."""

    def __init__(self, point: str) -> None:
        self.since = time.monotonic()
        self.answered = False
        self._point = point
        threading.Thread(target=self._send, name=f"ask {point}", daemon=True).start()

    def _send(self) -> None:
        with suppress(OSError):  # an error is an answer too
            os.statvfs(self._point)
        self.answered = True
