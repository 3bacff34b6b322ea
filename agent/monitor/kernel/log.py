"""This module inspects the kernel log: Xids, SXids, disks, file systems, memory, lockups, network cards.

One ``read`` of ``/dev/kmsg`` is one record: ``priority,sequence,microseconds since boot,flags;text``, then lines that
begin with a space. A priority of 8 or more means that a process wrote the record, and not the kernel (facility 1 and
more).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from agent.exposition import Described, described
from agent.monitor.gpu.reading import item_of
from agent.monitor.inspection import Inspection, InspectionResult, Limits, Site, of_no_job
from agent.monitor.kernel import rules
from agent.monitor.kernel.parts_of_jobs import PartsOfJobs
from agent.needs import KERNEL_LOG, StartedBy
from everstep.model import xid
from everstep.model.finding import Finding, Health, Owner, Reason, Remedy
from everstep.system import procfs
from everstep.system.wake_up import WakeUp

RECORD_BYTES = 8192
"""Length of the longest record; the kernel refuses to fill a smaller buffer."""
FIRST_USER_PRIORITY = 8
"""Lowest priority of a record that a process wrote."""
XID = re.compile(r"^NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)[^)]*\): (?P<code>\d+)(?:, |$)(?P<rest>.*)")
"""A MIG instance of the GPU may follow the address: ``PCI:0000:05:00 GPU-I:02``."""
SXID = re.compile(r"^nvidia-nvswitch\d+: SXid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): \d+, ")
FELL_OFF = re.compile(
    r"^(?:NVRM:\s+)?(?:GPU|The NVIDIA GPU) (?P<pci>[0-9a-fA-F:.]+).*fallen off the bus|^NVRM: +fallen off the bus",
    re.DOTALL,
)
"""The driver writes the second form if it has split its message into several lines. Then the GPU is not known."""
RECOVERED = re.compile(
    rf"^NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)[^)]*\): 154, .*{xid.NO_RECOVERY}", re.IGNORECASE
)
"""With this line, the driver reports that a GPU needs no recovery any more, because the GPU was reset."""
HEALED_AFTER_S = 30.0
"""The driver asks for a recovery within seconds after an Xid. If a GPU is healthy this long after its Xid, seconds, it
needs no recovery."""
LOST = Reason(
    "kernel-log-lost",
    "lines of the kernel log were overwritten before they were read, so faults may be missing",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
)


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One record of the kernel log."""

    sequence: int
    time_ns: int
    """When the line was written, nanoseconds of the wall clock."""
    text: str
    from_user: bool
    """Whether a process wrote it, and not the kernel."""
    lost: int = 0
    """Number of records just before it that were overwritten before they were read."""


class KernelLog:
    """Reads the kernel log from a record on.

    Args:
        path: Path of the device.
        after: Number of the last record that was read; -1: no record was read.
        now_ns: The wall clock.
    """

    def __init__(self, path: Path, after: int = -1, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._now_ns = now_ns
        self.last = after
        """Number of the last record that was read."""
        self.missed = 0
        """Number of records that were overwritten before they were read."""
        self._file: int | None = None
        self._wake_up = WakeUp()

    def read(self, wait_s: float) -> Iterator[KernelLine]:
        """Read new records; if there are none, wait at most ``wait_s`` for one.

        Raises:
            Lacks: the log cannot be opened.
        """
        file = self._open()
        if not self._wake_up.wait(file, wait_s):
            return
        while True:
            try:
                record = os.read(file, RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # the record was overwritten; the next read continues with the oldest record
                continue
            if not record:
                return
            line = self._parsed(record)
            if line and line.sequence > self.last:
                lost = line.sequence - self.last - 1 if self.last >= 0 else 0
                self.missed += lost
                self.last = line.sequence
                yield replace(line, lost=lost) if lost else line

    def hurry(self) -> None:
        """End the current or the next wait."""
        self._wake_up.ring()

    def close(self) -> None:
        """Close the device. No thread may read any more."""
        self._wake_up.close()
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _open(self) -> int:
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                # In a user namespace, the kernel accepts no capability.
                remedy = KERNEL_LOG.remedy(StartedBy.SHELL) if procfs.owner_of_hidden_files() is not None else ""
                raise KERNEL_LOG.lacked(f"{self._path} cannot be read ({error.strerror})", remedy) from error
        return self._file

    def _parsed(self, record: bytes) -> KernelLine | None:
        head, _, text = record.decode(errors="replace").partition(";")
        fields = head.split(",")
        try:
            priority, sequence, since_boot_us = int(fields[0]), int(fields[1]), int(fields[2])
        except (ValueError, IndexError):
            return None
        ago_ns = time.monotonic_ns() - since_boot_us * 1000
        first = text.splitlines()[0] if text else ""
        return KernelLine(sequence, self._now_ns() - max(ago_ns, 0), first, priority >= FIRST_USER_PRIORITY)


class KernelLogLimits(Limits):
    """How long findings from the kernel log stay active."""

    interval_s: float = Field(default=2.0, gt=0)
    """Longest wait for a line, seconds; a new line is read at once (ByteRobust, table 3: 2 s)."""
    xid_lasts_s: float = Field(default=24 * 3600.0, gt=0)
    """How long an Xid that requires a reset of the GPU stays active, seconds. An Xid that requires a reboot or a
    replacement stays active until the machine is rebooted."""
    application_lasts_s: float = Field(default=600.0, gt=0)
    """How long faults that a program caused, and a loss of lines, stay active, seconds."""


class KernelLogInspection(Inspection):
    """Reads each line since the machine was booted once, even if the agent is restarted."""

    name: ClassVar[str] = "kernel-log"
    inspects: ClassVar[str] = "the kernel log: GPU drivers, disks, file systems, memory, processors, network cards"
    reasons: ClassVar[tuple[Reason, ...]] = (*xid.REASONS, *rules.REASONS, LOST)
    metrics: ClassVar[Mapping[str, Described]] = described(
        ("kernel_log_missed_records_total", "", "records that were overwritten before they were read")
    )
    limits_type: ClassVar[type[Limits]] = KernelLogLimits
    waits: ClassVar[bool] = True

    def __init__(self, site: Site, limits: Limits, kept: Mapping[str, Any], *, same_boot: bool) -> None:
        super().__init__(site, limits, kept, same_boot=same_boot)
        self.kept.setdefault("last", -1)
        self._log = KernelLog(site.kernel_log, self.kept["last"], site.now_ns)
        # When the first agent since the boot of the machine began.
        self.kept.setdefault("began_ns", site.now_ns() if self.kept["last"] < 0 else 0)
        self.of_jobs = PartsOfJobs(site)

    def inspect(self) -> InspectionResult:
        """Wait for lines, and apply the rules to them."""
        for line in self._log.read(self.limits.interval_s):
            self._accept(line)
        self.kept["last"] = self._log.last
        findings = [healed(found) if self._is_healed(found) else found for found in self.noted()]
        return InspectionResult(findings, {"kernel_log_missed_records_total": float(self._log.missed)})

    def hurry(self) -> None:
        """End the wait for a line."""
        self._log.hurry()

    def close(self) -> None:
        """Do nothing: the thread may be reading, so the device is closed when the process ends."""

    def _accept(self, line: KernelLine) -> None:
        text = line.text
        if line.lost:
            self._note_lost(line)
        self.kept["last_ns"] = line.time_ns
        if line.from_user:
            tag = self.site.kernel_log_tag
            if not tag or not text.startswith(tag):
                return  # any process could have written it
            text = text.removeprefix(tag).lstrip(": ")
        now_ns = self.site.now_ns()
        if recovered := RECOVERED.search(text):
            self.kept.setdefault("recovered", {})[item_of(recovered["pci"], -1)] = line.time_ns
        for judged, lasts_s in self._judged(text, line.time_ns):
            is_ours = line.from_user or self.of_jobs.is_ours(judged, text)
            finding = judged if is_ours else of_no_job(judged)
            until_ns = line.time_ns + round((lasts_s or 0.0) * 1e9)
            if lasts_s is None or until_ns > now_ns:
                self.note(finding, at_ns=line.time_ns, lasts_s=lasts_s)

    def _is_healed(self, finding: Finding) -> bool:
        """Return whether a fault of a GPU is over: its driver asks for no recovery any more, or the fault is old.

        A fault whose remedy is a reset is old if it happened long before the first agent began. The GPU may have been
        reset since then. If the fault still exists, the inspection of GPUs shows it, or the log reports it again.
        """
        last_ns = max(finding.last_ns, finding.since_ns)
        if not finding.item.startswith("GPU ") or finding.remedy not in {Remedy.RESET_GPU, Remedy.REBOOT}:
            return False
        healthy_ns = self.site.healthy_gpus.get(finding.item, 0) - round(HEALED_AFTER_S * 1e9)
        if max(healthy_ns, self.kept.get("recovered", {}).get(finding.item, 0)) > last_ns:
            return True
        is_old = self.kept["began_ns"] - last_ns > self.limits.application_lasts_s * 1e9
        return is_old and finding.remedy is Remedy.RESET_GPU

    def _note_lost(self, line: KernelLine) -> None:
        """Note that lines before this one were overwritten."""
        first, now_ns = line.sequence - line.lost, self.site.now_ns()
        before_ns = self.kept.get("last_ns")
        after = f"after {_utc(before_ns)} and " if before_ns else ""
        numbers = f"record {first}" if line.lost == 1 else f"{line.lost} records ({first} to {line.sequence - 1})"
        seen = f"{numbers}, written {after}before {_utc(line.time_ns)}"
        found = self.finding(LOST, "", seen, since_ns=now_ns)
        self.note(found, at_ns=now_ns, lasts_s=self.limits.application_lasts_s)

    def _judged(self, text: str, time_ns: int) -> list[tuple[Finding, float | None]]:
        """Return the findings that a line reports, each with the seconds that it stays active; None: until a reboot."""
        if match := XID.search(text):
            reason = xid.xid_of(int(match["code"]), match["rest"])
            return [self._of_gpu(reason, f"GPU {match['pci']}", text, time_ns)]
        if match := SXID.search(text):
            reason = xid.SXID_FATAL if re.search(xid.SXID_LINE, text, re.IGNORECASE) else xid.SXID
            return [self._of_gpu(reason, f"NVSwitch {match['pci']}", text, time_ns)]
        if match := FELL_OFF.search(text):
            pci = (match["pci"] or "").rstrip(".").split(".")[0]
            return [self._of_gpu(xid.xid_of(79), f"GPU {pci}" if pci else "", text, time_ns)]
        if match := rules.OOM_KILL.search(text):
            return self._oom(match, text, time_ns)
        for rule in rules.RULES:
            if match := rule.pattern.search(text):
                name = next((value for value in match.groupdict().values() if value), "")
                item = f"{rule.kind} {name}".strip() if name else ""
                return [(self.finding(rule.reason, item, text, since_ns=time_ns), rule.lasts_s)]
        return []

    def _of_gpu(self, reason: Reason, item: str, text: str, time_ns: int) -> tuple[Finding, float | None]:
        lasts_s = self.limits.application_lasts_s if not reason.sure else self.limits.xid_lasts_s
        found = self.finding(reason, item, text, since_ns=time_ns)
        return found, None if reason.remedy in {Remedy.REBOOT, Remedy.REPLACE} else lasts_s

    def _oom(self, match: re.Match[str], text: str, time_ns: int) -> list[tuple[Finding, float | None]]:
        pid = int(match["pid"])
        killed = next((rank for rank in self.site.ranks() if rank.pid == pid), None)
        if killed is None and self.site.shared_folders:
            return []  # the process was of another agent, or of no job on this machine
        reason = rules.OOM_IN_LIMIT if match["cgroup"].startswith("Memory cgroup") else rules.OOM_OF_MACHINE
        item = f"rank {killed.rank} of {killed.job}" if killed else "a process of no job"
        return [(self.finding(reason, item, text, since_ns=time_ns), self.limits.application_lasts_s)]


def healed(finding: Finding) -> Finding:
    """Convert a finding about a GPU that needs no recovery any more: it is shown, but does not blame the machine."""
    text = f"{finding.text} (the GPU has recovered since, or may have been reset)"
    return finding.model_copy(update={"verdict": Health.UNKNOWN, "sure": False, "text": text})


def _utc(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC"
