"""This module has the rules for lines of the kernel log that report faults of the machine, except for Xids and SXids.

The patterns follow the messages in the kernel's sources. The patterns for drivers of NVIDIA and Mellanox follow other
monitors (gpud, NVSentinel). The patterns for amdgpu follow the messages in ``amdgpu_ras.c`` and ``amdgpu_device.c``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from everstep.model.finding import Health, Owner, Reason, Remedy

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
NO_DISK = r"(?:fd|sr|loop|nbd|ram|zram)\d"
"""Devices that are not disks of the machine: removable media, network block devices, files and memory as devices."""


@dataclass(frozen=True, slots=True)
class KernelRule:
    """A kind of line of the kernel log, and the reason of its finding."""

    reason: Reason
    pattern: re.Pattern[str]
    """The first named group that matches is the name of the part, e.g. ``sda``."""
    examples: tuple[str, ...]
    lasts_s: float | None = None
    """How long the finding stays active, seconds; None: until the machine is rebooted."""
    kind: str = ""
    """Kind of the part, e.g. ``disk``."""


def _rule(
    code: str,
    means: str,
    pattern: str,
    *examples: str,
    owner: Owner = Owner.MACHINE,
    remedy: Remedy = Remedy.REPLACE,
    verdict: Health = Health.FAULTY,
    sure: bool = False,
    lasts_s: float | None = None,
    kind: str = "",
) -> KernelRule:
    return KernelRule(Reason(code, means, owner, remedy, verdict, sure), re.compile(pattern), examples, lasts_s, kind)


RULES: tuple[KernelRule, ...] = (
    _rule(
        "disk-failed",
        "a disk failed",
        r"^md/raid[^:]*:(?P<item>\S+): Disk failure on|^nvme (?P<item2>\S+): Disabling device after reset failure",
        "md/raid1:md0: Disk failure on sdb1, disabling device.",
        "nvme nvme0: Disabling device after reset failure: -19",
        sure=True,
        kind="disk",
    ),
    _rule(
        "disk-errors",
        "a disk fails to read or write",
        # This leaves out removable and virtual devices, and operations that a device does not support (DISCARD).
        r"^(?:Buffer I/O error on dev|(?:blk_update_request: )?(?:critical medium|I/O) error, dev) "
        rf"(?P<item>(?!{NO_DISK})[^ ,]+)(?!.*\bDISCARD\b)"
        r"|(?P<item2>nvme\S+): I/O .*timeout, (?:reset controller|aborting)|rejecting I/O to (?:dead|offline) device",
        "Buffer I/O error on dev sda1, logical block 5, lost async page write",
        "blk_update_request: I/O error, dev sdb, sector 2048 op 0x0:(READ) flags 0x0",
        "critical medium error, dev sdc, sector 1234",
        "nvme nvme1: I/O 12 QID 3 timeout, reset controller",
        "sd 0:0:0:0: rejecting I/O to offline device",
        lasts_s=DAY_S,
        kind="disk",
    ),
    _rule(
        "fs-made-readonly",
        "the kernel made a file system read-only after errors",
        rf"^(?:EXT4-fs|F2FS-fs|BTRFS\w*)[^(]*\((?:device )?(?P<item>(?!device |{NO_DISK})[^)]+)\).*"
        r"(?:[Rr]emounting filesystem read-only|forced readonly)"
        rf"|^XFS \((?P<item2>(?!{NO_DISK})[^)]+)\).*(?:Filesystem has been shut down|[Ss]hutting down filesystem)",
        "EXT4-fs (nvme0n1p2): Remounting filesystem read-only",
        "BTRFS info (device sda2): forced readonly",
        "XFS (dm-0): Corruption of in-memory data detected.  Shutting down filesystem",
        sure=True,
        kind="disk",
    ),
    _rule(
        "fs-errors",
        "a file system is damaged",
        r"^(?:EXT4-fs error|F2FS-fs error|BTRFS (?:critical|error)|XFS(?= .*Metadata corruption))[^(]*"
        rf"\((?:device )?(?P<item>(?!device |{NO_DISK})[^)]+)\)",
        "EXT4-fs error (device sda1): ext4_find_entry:1463: inode #2: comm ls: reading directory lblock 0",
        lasts_s=DAY_S,
        kind="disk",
    ),
    _rule(
        "nfs-silent",
        "a file server does not answer",
        r"nfs: server (?P<item>\S+) not responding",
        "nfs: server 10.0.0.5 not responding, still trying",
        owner=Owner.STORAGE,
        remedy=Remedy.WATCH,
        verdict=Health.UNKNOWN,
        lasts_s=600.0,
        kind="server",
    ),
    _rule(
        "task-blocked",
        "a process has been blocked in the kernel for minutes, e.g. by a disk, a mount or a driver",
        r"INFO: task .+:\d+ blocked (?:in I/O wait )?for more than \d+ seconds",
        "INFO: task python3:4711 blocked for more than 122 seconds.",
        owner=Owner.UNKNOWN,
        remedy=Remedy.WATCH,
        verdict=Health.UNKNOWN,
        lasts_s=HOUR_S,
    ),
    _rule(
        "cpu-lockup",
        "a processor is stuck in the kernel",
        r"(?:soft lockup - CPU#|hard LOCKUP on cpu |rcu_\w+ (?:self-)?detected (?:expedited )?stalls? on CPU)",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:1234]",
        "NMI watchdog: Watchdog detected hard LOCKUP on cpu 7",
        "rcu: INFO: rcu_sched self-detected stall on CPU",
        remedy=Remedy.REBOOT,
        lasts_s=DAY_S,
    ),
    _rule(
        "kernel-bug",
        "the kernel failed",
        r"^(?:BUG: (?:unable to handle|kernel NULL pointer|Bad page state|Bad rss-counter)|Oops: |kernel BUG at "
        r"|general protection fault)",
        "BUG: unable to handle page fault for address: ffffa1b2c3d4e5f6",
        "kernel BUG at mm/slub.c:305!",
        remedy=Remedy.REBOOT,
    ),
    _rule(
        "hardware-error",
        "a processor or memory reported an error that was not corrected",
        # Lines of BERT are about the time before this boot.
        r"^(?!BERT)(?:mce: \[Hardware Error\].*(?:Uncorrected|fatal|PCC)|mce: Uncorrected hardware memory error"
        r"|EDAC .*\b[1-9]\d* UE\b|Memory failure: 0x\w+:)",
        "mce: Uncorrected hardware memory error in user-access at 3f1e2c000",
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
        "Memory failure: 0x1a2b3c: recovery action for dirty LRU page: Recovered",
        sure=True,
    ),
    _rule(
        "pcie-error",
        "PCIe reports an error that was not corrected",
        r"(?P<item>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d).*PCIe Bus Error: severity=Uncorrect",
        "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
        remedy=Remedy.REBOOT,
        lasts_s=DAY_S,
        kind="PCI",
    ),
    _rule(
        "gpu-init-failed",
        "the driver could not initialize a GPU",
        r"^NVRM: GPU (?P<item>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2})\.\d: RmInitAdapter failed!",
        "NVRM: GPU 0000:b3:00.0: RmInitAdapter failed! (0x26:0x56:1474)",
        remedy=Remedy.REBOOT,
        lasts_s=DAY_S,
        kind="GPU",
    ),
    _rule(
        "amd-gpu-memory",
        "memory of an AMD GPU has errors that were not corrected",
        r"amdgpu (?P<item>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2})\.\d: .*"
        r"\b[1-9]\d* (?:new )?uncorrectable hardware errors detected in (?:\w+ )?\w+ block",
        "amdgpu 0000:3d:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block",
        lasts_s=DAY_S,
        kind="GPU",
    ),
    _rule(
        "amd-gpu-reset",
        "the driver resets an AMD GPU that does not answer",
        r"amdgpu (?P<item>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2})\.\d: .*(?:GPU reset begin!|GPU reset\(\d+\) failed)",
        "amdgpu 0000:3d:00.0: amdgpu: GPU reset begin!",
        owner=Owner.UNKNOWN,
        remedy=Remedy.RESTART_JOB,
        verdict=Health.UNKNOWN,
        lasts_s=HOUR_S,
        kind="GPU",
    ),
    _rule(
        "nic-failed",
        "a network card failed",
        r"mlx5_core (?P<item>\S+?):?(?: \S+:)? .*(?:unrecoverable hardware error|device's health compromised|"
        r"timeout\. Will cause a leak of a command resource)",
        "mlx5_core 0000:12:00.0: poll_health:955:(pid 0): device's health compromised - reached miss count",
        "mlx5_core 0000:12:00.0: mlx5_cmd_check:  timeout. Will cause a leak of a command resource",
        sure=True,
        kind="PCI",
    ),
    _rule(
        "nic-trouble",
        "a network card or its cable has a problem",
        r"NETDEV WATCHDOG: (?P<item>\S+) .*transmit queue \d+ timed out"
        r"|mlx5_core (?P<item2>\S+?):? .*(?:insufficient power|High Temperature|Cable unplugged)",
        "NETDEV WATCHDOG: ens1f0 (mlx5_core): transmit queue 5 timed out",
        "mlx5_core 0000:12:00.0: Port module event[error]: module 0, Cable error, Cable unplugged",
        owner=Owner.NETWORK,
        remedy=Remedy.WATCH,
        verdict=Health.UNKNOWN,
        lasts_s=HOUR_S,
        kind="NIC",
    ),
    _rule(
        "files-exhausted",
        "no more files can be opened on the machine",
        r"VFS: file-max limit \d+ reached",
        "VFS: file-max limit 100000 reached",
        owner=Owner.UNKNOWN,
        remedy=Remedy.CHECK_SETUP,
        verdict=Health.UNKNOWN,
        lasts_s=HOUR_S,
    ),
    _rule(
        "nccl-segfault",
        "a process crashed inside NCCL",
        r"segfault at .* in libnccl\.so",
        "python3[4711]: segfault at 0 ip 00007f sp 00007f error 4 in libnccl.so.2[7f00+1000]",
        owner=Owner.UNKNOWN,
        remedy=Remedy.RESTART_JOB,
        verdict=Health.UNKNOWN,
        lasts_s=HOUR_S,
    ),
)

OOM_KILL = re.compile(r"(?P<cgroup>Memory cgroup out of memory|Out of memory)[^:]*: Kill(?:ed)? process (?P<pid>\d+) ")
OOM_IN_LIMIT = Reason(
    "oom-kill-limit",
    "the kernel killed a process because its cgroup has used up its memory",
    Owner.CODE,
    Remedy.CHECK_CODE,
    Health.UNKNOWN,
)
OOM_OF_MACHINE = Reason(
    "oom-kill",
    "the kernel killed a process because the machine's memory was used up",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
)
REASONS = (*(rule.reason for rule in RULES), OOM_IN_LIMIT, OOM_OF_MACHINE)
