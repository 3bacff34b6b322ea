"""Defines the format of a checkpoint file in shared memory: slots, headers, pins and checksums.

Layout, little endian, every header and payload on a page boundary::

    0       magic 8s · version u32 · slots u32 · capacity u64 · checksum u64
    64      pins: one i64 for each of ``Pin``, the pinned step or -1
    4096    slot 0: header page, then ``capacity`` bytes of payload
    ...     slot 1, 2, …

    slot header: 0 completed_steps i64 (-1: nothing) · 8 generation u32 · 12 phase u32 (0 unused, 1 a save is under
                 way, 2 saved) · 16 tensor_bytes u64 · 24 structure_bytes u64 · 32 checksum u64 · 40 saved_ns i64 ·
                 48 header checksum u64
    payload:     the tensors' bytes, then (64-byte aligned) the structure

Checksums are xxh3_64. The checksum in the slot header covers the payload. It is seeded with the completed steps, so
that a payload does not match the header of another step. The header checksum covers the fields before it. This module
does not import torch, since agents read these files too.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import xxhash

MAGIC = b"EVSTCKP1"
VERSION = 2
PAGE = 4096
ALIGNMENT = 64
"""Tensors and the structure begin at multiples of this many bytes in the payload."""
EMPTY = -1
"""``completed_steps`` of an empty slot."""
NEVER_USED = "empty"
"""``SlotInfo.reason`` of a slot in which nothing was ever saved; it is not damaged."""
CUT_SHORT = "a save into it was cut short"
"""``SlotInfo.reason`` of a slot whose save is not committed: the save is running, or its rank ended."""
DAMAGED = "its contents do not match their checksum"
"""``SlotInfo.reason`` of a slot whose payload is damaged."""

FILE = struct.Struct("<8sIIQ")
SLOT = struct.Struct("<qIIQQQq")
U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")
UNUSED, SAVING, SAVED = 0, 1, 2
CHUNK = 1 << 20
MAX_SLOTS = 64
PINS_AT = 64

Chunks = Callable[[int], Iterable[memoryview]]


class Pin(IntEnum):
    """Why the agent keeps a step. If all slots are pinned, a save overwrites the slot with the lowest pin."""

    KEEP = 0
    """The newest step for which all ranks are known to have a backup. If some ranks restore this step from backups,
    the other ranks need their own slots of the step."""
    BACKUP = 1
    """The step that is sent to the peer. If it is overwritten, the next step is sent instead."""
    NAMED = 2
    """The step that all machines back up together. It is pinned before it is saved, so that no save overwrites it."""
    DISK = 3
    """The step that is written to disk. It has the highest pin: otherwise steps that are sent would always replace
    it."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """The contents of a slot of a checkpoint file."""

    completed_steps: int
    """Completed steps of the state; -1: the slot has no state."""
    generation: int
    """Generation of the job that saved the state."""
    bytes: int
    """Bytes of tensors and structure together."""
    valid: bool
    reason: str = ""
    """Why the slot is not valid; empty: it is valid."""
    saved_ns: int = 0
    """When the rank committed the slot, nanoseconds of the wall clock."""


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header of a committed slot. It is sent together with the payload."""

    completed_steps: int
    generation: int
    tensor_bytes: int
    structure_bytes: int
    checksum: int
    """xxh3_64 of the payload, seeded with ``completed_steps``."""
    saved_ns: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors, padding and structure together."""
        return aligned(self.tensor_bytes) + self.structure_bytes


def same_save(header: SlotHeader, saved_ns: int) -> bool:
    """Whether a slot has the save of a certain time.

    A rank may save the same step several times: after the job resumed from an earlier step, or in another run. The time
    identifies a save, since no two saves have the same nanosecond and copies of a slot keep the time. The generation
    does not identify a save, because a copy from another run gets a generation of the run that restores it.

    Args:
        header: The header of the slot.
        saved_ns: Time of the wanted save, nanoseconds; 0: any save.
    """
    return saved_ns in {0, header.saved_ns}


PINS = struct.Struct(f"<{len(Pin)}q")


def pins_of(mapped: mmap.mmap | bytes) -> list[int]:
    """The pinned step of each ``Pin``; -1: none.

    Args:
        mapped: The file, from its beginning on.
    """
    return list(PINS.unpack_from(mapped, PINS_AT))


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``to``, bytes."""
    return -(-size // to) * to


def capacity_for(payload_bytes: int) -> int:
    """Capacity of each slot, bytes, in a file that is made for payloads of ``payload_bytes``.

    It is somewhat larger than the payload, so that a longer structure does not make the file grow again.
    """
    return aligned(payload_bytes + max(payload_bytes // 64, 16 * PAGE), PAGE)


def file_bytes(payload_bytes: int, slots: int) -> int:
    """Size, bytes, of a file that is made for payloads of ``payload_bytes``."""
    return PAGE + slots * (PAGE + capacity_for(payload_bytes))


def file_header(page: bytes) -> tuple[int, int, str]:
    """Number of slots, capacity in bytes, and what is wrong with the file's header; empty: it is correct."""
    if len(page) < FILE.size + 8:
        return 0, 0, f"the file has {len(page)} bytes, less than its header"
    magic, version, slots, capacity = FILE.unpack_from(page)
    if magic != MAGIC or version != VERSION:
        return 0, 0, f"not a checkpoint file of version {VERSION}"
    if U64.unpack_from(page, FILE.size)[0] != xxhash.xxh3_64_intdigest(page[: FILE.size]):
        return 0, 0, "the file's header does not match its checksum"
    return slots, capacity, ""


def inspect_slot(page: bytes, room: int, chunks: Chunks | None) -> SlotInfo:
    """Check a slot.

    Args:
        page: The page with the slot's header.
        room: Number of bytes that the file has for the payload.
        chunks: Gives the first bytes of the payload, as many as requested, to compare their checksum; None: the
            contents are not checked.
    """
    steps, generation, phase, tensor_bytes, structure_bytes, checksum, saved_ns = SLOT.unpack_from(page)
    used = aligned(tensor_bytes) + structure_bytes

    def broken(reason: str, at_steps: int = steps) -> SlotInfo:
        return SlotInfo(at_steps, generation, used, False, reason, saved_ns)

    if steps == EMPTY:
        return broken(CUT_SHORT if phase in {SAVING, SAVED} else NEVER_USED)
    if steps < 0 or U64.unpack_from(page, SLOT.size)[0] != xxhash.xxh3_64_intdigest(page[: SLOT.size]):
        return broken("its header does not match its checksum")
    if used > room:
        return broken(f"truncated: {room} of {used} bytes are there")
    if chunks is not None:
        digest = xxhash.xxh3_64(seed=steps)
        for chunk in chunks(used):
            digest.update(chunk)
        if digest.intdigest() != checksum:
            return broken(DAMAGED)
    return SlotInfo(steps, generation, used, True, saved_ns=saved_ns)


OWN, BACKUP = "checkpoint-", "backup-"
"""Beginnings of the names of slot files; the number of the rank follows."""


def own_slots(shm: Path, rank: int) -> Path:
    """The file of a rank's own slots; ``shm`` is the job's folder in the machine's shared memory."""
    return shm / f"{OWN}{rank}"


def backup_slots(shm: Path, rank: int) -> Path:
    """The file of the backups of a rank that another machine runs."""
    return shm / f"{BACKUP}{rank}"
