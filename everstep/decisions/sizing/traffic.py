"""Computes the traffic of copies: backups over the network, files on disk and on remote storage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from everstep.decisions.sizing.load import Load

BACKUP_CPU_S_PER_GB = 0.62
"""CPU time of both agents for a backup, seconds per GB (measured, docs/benchmarks/checkpoints.md)."""


@dataclass(frozen=True, slots=True)
class BackupPlan:
    """The backups that a machine sends; it receives as many."""

    bytes: int
    """Bytes of one step."""
    rate: float
    """Bytes per second at which the machine can send."""
    bound_by: str
    """What limits the rate: a setting, the cards, or the card for management."""
    seconds: float
    """Time of the backup of one step."""
    every_steps: int
    """Every n-th step is backed up: ``backup_every_steps``, or more if backups are slower than steps, or if fewer steps
    are saved."""
    per_second: float
    """Backups of a step per second."""
    card_share: float
    """Mean share of the cards that backups use, in each direction."""
    cores: float
    """Mean number of cores that sending and receiving use."""
    management_s: float
    """Time of the backup of one step over the card for management, seconds; 0: there is none."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The files that a machine writes: to its disk, or to remote storage."""

    bytes: int
    """Bytes of one step."""
    seconds: float
    """Time to write one step."""
    every_s: float
    """Time between two steps that are written, seconds."""
    fits: bool
    """Whether a step is written before the next one is due."""
    mean_rate: float
    """Mean bytes per second."""
    space: int
    """Bytes that have to be free: on the machine's disk, or on the storage for all machines."""


def plan_backups(load: Load, step_s: float, saved_every: int = 1) -> BackupPlan | None:
    """Compute the traffic of backups; None: there are none.

    Args:
        load: The job.
        step_s: Mean time of a step with its share of a save, seconds.
        saved_every: Every n-th step is saved.
    """
    if not load.backup_slots:
        return None
    hardware, policy = load.hardware, load.policy
    network = hardware.cards * hardware.card_gb_s or hardware.management_gbit_s / 8
    # Each card has connections of its own (``agent/checkpoints/peers/sender.py``).
    connections = policy.transfer_connections * max(1, hardware.cards)
    limits = {
        "transfer_connections": 1e9 * hardware.connection_gb_s * connections,
        "the cards" if hardware.cards else "the card for management": 1e9 * network,
    }
    if policy.backup_card_share:
        limits["backup_card_share"] = 1e9 * network * policy.backup_card_share
    if policy.backup_rate_mb_s:
        limits["backup_rate_mb_s"] = 1e6 * policy.backup_rate_mb_s
    bound_by, rate = min(limits.items(), key=lambda limit: limit[1])
    size = load.machine_bytes
    seconds = size / rate if rate else math.inf
    wanted = math.lcm(policy.backup_every_steps, saved_every)
    every = wanted * max(1, math.ceil(seconds / (wanted * step_s))) if rate else 0
    sent = size / (every * step_s) if every else 0.0
    return BackupPlan(
        bytes=size,
        rate=rate,
        bound_by=bound_by,
        seconds=seconds,
        every_steps=every,
        per_second=1 / (every * step_s) if every else 0.0,
        card_share=sent / (1e9 * network) if network else 0.0,
        cores=BACKUP_CPU_S_PER_GB * sent / 1e9,
        management_s=size * 8 / (1e9 * hardware.management_gbit_s) if hardware.management_gbit_s else 0.0,
    )


def plan_disk(load: Load, step_s: float) -> FilePlan | None:
    """Compute the traffic to the disks; None: nothing is written."""
    every_s = _every_s(load, step_s)
    if not load.policy.disk or not every_s:
        return None
    return _files(load, load.hardware.disk_write_gb_s, every_s, (load.policy.disk_keep + 1) * load.machine_bytes)


def plan_remote(load: Load, step_s: float) -> FilePlan | None:
    """Compute the traffic to remote storage; None: nothing is written there."""
    every_s = _every_s(load, step_s)
    if not load.policy.disk or not load.policy.remote_url or not every_s:
        return None
    space = (load.policy.remote_keep + 1) * load.machine_bytes * load.machines
    return _files(load, load.hardware.remote_gb_s, every_s, space)


def _every_s(load: Load, step_s: float) -> float:
    """Time between two steps on disk, seconds; 0: no step is written."""
    due = [load.policy.disk_every_steps * step_s, load.policy.disk_every_min * 60]
    return min((each for each in due if each), default=0.0)


def _files(load: Load, gb_s: float, every_s: float, space: int) -> FilePlan:
    size = load.machine_bytes
    seconds = size / 1e9 / gb_s
    return FilePlan(size, seconds, every_s, seconds <= every_s, size / max(every_s, seconds), space)
