"""Computes how much memory checkpoints need on a machine, and whether the machine has enough."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.base.text import size_text
from everstep.slots.format import file_bytes

SAFE_SLOTS = 3
"""With this many slots one is written, and two keep the newest step that all ranks have. So a job begins if at least
these fit; with more slots, less is lost when a machine is lost."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of shared memory that a job's checkpoints need on one machine."""

    state_bytes: int
    """Size of the state of one rank, bytes."""
    ranks: int
    """Number of ranks on the machine."""
    slots: int
    backup_slots: int
    own: int
    """Bytes of the slots of the machine's own ranks."""
    backups: int
    """Bytes of the backups of other machines' ranks; there is one backup for each own rank."""

    @property
    def total(self) -> int:
        """Bytes of all slots."""
        return self.own + self.backups


def footprint(state_bytes: int, ranks: int, slots: int, backup_slots: int) -> Footprint:
    """The footprint of a job on a machine. Files that grow up to it need no memory beyond it.

    Args:
        state_bytes: Size of the state of one rank, bytes.
        ranks: Number of ranks on the machine.
        slots: Number of slots of each rank.
        backup_slots: Number of slots of each backup; 0: there are no backups.
    """
    own = ranks * file_bytes(state_bytes, slots)
    backups = ranks * file_bytes(state_bytes, backup_slots) if backup_slots else 0
    return Footprint(state_bytes, ranks, slots, backup_slots, own, backups)


def larger_shm(size: int) -> str:
    """How to make shared memory as large as needed, in containers and outside of them.

    Args:
        size: Bytes that shared memory should have, or more.
    """
    gib = -(-size // (1 << 30))
    return (
        f"make /dev/shm larger (docker: --shm-size={gib}g; Kubernetes: emptyDir with medium: Memory and sizeLimit: "
        f"{gib}Gi; elsewhere: mount -o remount,size={gib}G /dev/shm)"
    )


def refusal(need: Footprint, shm_free: int, memory_available: int, where: str) -> str:
    """Why a job's checkpoints do not fit, with all numbers and what to do; empty: they fit.

    Args:
        need: The footprint of the job.
        shm_free: Free bytes of shared memory, including those that the job's files already have.
        memory_available: Bytes of memory that may still be used, including those that the job's files already have.
        where: The machine, for the message, e.g. ``machine m2``.
    """
    short = []
    if need.total > shm_free:
        short.append(f"/dev/shm has {size_text(shm_free)}")
    if need.total > memory_available:
        short.append(f"{size_text(memory_available)} of memory are available")
    if not short:
        return ""
    for_backup = f" and {need.backup_slots} for a backup" if need.backup_slots else ""
    parts = (
        f"{size_text(need.own)} for its own, {size_text(need.backups)} for backups"
        if need.backups
        else "all for its own"
    )
    fits = [room for room in (shm_free, memory_available) if room < need.total]
    advice = ["use fewer slots", "shard the state over more ranks"]
    if need.backups and need.own <= min(fits):
        advice.insert(0, "turn backups off")
    if need.total > shm_free:
        advice.insert(0, larger_shm(need.total))
    return (
        f"no room for checkpoints on {where}: {need.ranks} ranks with {size_text(need.state_bytes)} of state each and "
        f"{need.slots} slots{for_backup} need {size_text(need.total)} ({parts}), but {' and '.join(short)}. "
        f"What helps: {', '.join(advice[:-1])} or {advice[-1]}"
    )
