"""Lists the copies of training state that this machine holds in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agent.checkpoints.options import Place
from agent.checkpoints.save_watch import backup_files, own_files
from agent.v1 import agent_pb2 as pb
from everstep.slots.format import SlotInfo
from everstep.slots.reader import held


def in_memory(
    place: Place, *, verify_own: bool = False, verify_backups: bool = False, own_bytes: int = 0
) -> list[pb.HeldCheckpoint]:
    """List every slot of the job's own files and of its backups for other machines; files are read in parallel.

    Args:
        place: Locations of the job's copies.
        verify_own: Also compare the checksums of the contents of own slots, without a time limit: 5 to 8 GB/s on each
            core (docs/concepts/checkpoints.md).
        verify_backups: Also compare the checksums of backups; a restore from a backup always verifies it.
        own_bytes: Compare the checksums of own slots if all own slots together have at most this many bytes.
    """
    own, backups = own_files(place.shm), backup_files(place.shm)
    copies = _list(own, pb.HeldCheckpoint.OWN, place, verify=verify_own)
    if not verify_own and sum(copy.bytes for copy in copies) <= own_bytes:
        copies = _list(own, pb.HeldCheckpoint.OWN, place, verify=True)
    return [*copies, *_list(backups, pb.HeldCheckpoint.BACKUP, place, verify=verify_backups)]


def _list(
    files: Mapping[int, Path], tier: pb.HeldCheckpoint.Tier.ValueType, place: Place, *, verify: bool
) -> list[pb.HeldCheckpoint]:
    if not files:
        return []
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1), thread_name_prefix="verify") as pool:
        listings = list(pool.map(lambda path: held(path, verify=verify), files.values()))
    return [
        checkpoint
        for rank, slots in zip(files, listings, strict=True)
        for checkpoint in _checkpoints(place.run, rank, tier, slots, verify)
    ]


def _checkpoints(
    run: str, rank: int, tier: pb.HeldCheckpoint.Tier.ValueType, slots: Iterable[SlotInfo], verified: bool
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
            unverified=slot.valid and not verified,
        )
        for slot in slots
    ]
