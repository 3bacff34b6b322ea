"""Which copies of training state this machine holds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from agent.bell import backup_files, own_files
from agent.terms import Place
from agent.v1 import agent_pb2 as pb
from everstep.slot_format import SlotInfo
from everstep.slot_reader import held


def in_memory(place: Place, *, verify_own: bool, verify_backups: bool) -> list[pb.HeldCheckpoint]:
    """Every slot of the job's own files and of the backups held for others, files in parallel.

    Args:
        place: Of the job.
        verify_own: Compare the checksums of the contents of own slots too: 13 GB/s on each core.
        verify_backups: Those of backups; who restores from one verifies it anyway.
    """
    shm = place.shm
    work = [
        *((rank, path, pb.HeldCheckpoint.OWN, verify_own) for rank, path in own_files(shm).items()),
        *((rank, path, pb.HeldCheckpoint.BACKUP, verify_backups) for rank, path in backup_files(shm).items()),
    ]
    if not work:
        return []
    with ThreadPoolExecutor(min(len(work), os.cpu_count() or 1), thread_name_prefix="verify") as pool:
        found = list(pool.map(lambda one: held(one[1], verify=one[3]), work))
    return [
        checkpoint
        for (rank, _, tier, _), slots in zip(work, found, strict=True)
        for checkpoint in _checkpoints(place.run, rank, tier, slots)
    ]


def _checkpoints(
    run: str, rank: int, tier: pb.HeldCheckpoint.Tier.ValueType, slots: Iterable[SlotInfo]
) -> list[pb.HeldCheckpoint]:
    return [
        pb.HeldCheckpoint(
            rank=rank,
            completed_steps=slot.completed_steps,
            bytes=slot.bytes,
            valid=slot.valid,
            reason=slot.reason,
            tier=tier,
            generation=slot.generation,
            saved_ns=slot.saved_ns,
            run=run,
        )
        for slot in slots
    ]
