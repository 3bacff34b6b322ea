"""Damage to saved state: real changes to real files, behind the back of who wrote them."""

from __future__ import annotations

import os
from pathlib import Path

from drills.observe.stored_copies import Damaged
from everstep.errors import ClusterError
from everstep.slots.format import PAGE, SLOT, aligned, file_header


def flip_in_slot(path: Path, rank: int, step: int) -> Damaged:
    """Flip a bit in the middle of the tensors of one step in a checkpoint file in shared memory.

    Raises:
        ClusterError: the file does not hold that step.
    """
    with path.open("r+b", buffering=0) as file:
        slots, capacity, reason = file_header(file.read(PAGE))
        for index in range(slots if not reason else 0):
            at = PAGE + index * (PAGE + capacity)
            steps, _, _, tensor_bytes, structure_bytes, _, _ = SLOT.unpack(os.pread(file.fileno(), SLOT.size, at))
            if steps == step:
                middle = at + PAGE + (tensor_bytes or aligned(tensor_bytes) + structure_bytes) // 2
                return Damaged(path, rank, step, _flip(file.fileno(), middle))
    raise ClusterError(f"{path} does not hold step {step} of rank {rank} any more: nothing to damage")


def flip_in_file(path: Path, rank: int, step: int) -> Damaged:
    """Flip a bit in the middle of a file."""
    with path.open("r+b", buffering=0) as file:
        return Damaged(path, rank, step, _flip(file.fileno(), os.fstat(file.fileno()).st_size // 2))


def truncate(path: Path, rank: int, step: int) -> Damaged:
    """Cut the second half of a file off."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return Damaged(path, rank, step, f"cut from {size} to {size // 2} bytes")


def _flip(descriptor: int, at: int) -> str:
    byte = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte[0] ^ 1]), at)
    return f"bit 0 of byte {at} flipped"
