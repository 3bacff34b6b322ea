"""The format of a checkpoint file: slots, headers, pins, checksums. Used by writer and readers alike.

Layout, little endian, every header and payload on a page boundary::

    0       magic 8s · version u32 · slots u32 · capacity u64 · checksum u64
    64      pins: one i64 for each of ``Pin``, the pinned step or -1
    4096    slot 0: header page, then ``capacity`` bytes of payload
    ...     slot 1, 2, …

    slot header: 0 completed_steps i64 (-1: nothing) · 8 generation u32 · 12 phase u32 (0 unused, 1 a save is under
                 way, 2 saved) · 16 tensor_bytes u64 · 24 structure_bytes u64 · 32 checksum u64 · 40 saved_ns i64 ·
                 48 header checksum u64
    payload:     the tensors' bytes, then (64-byte aligned) the structure

Checksums are xxh3_64: the one in the header covers the payload and is seeded with the completed steps, so that data
under the label of another step does not verify; the header's own covers the fields before it. No torch here: the agent
reads these files too.
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
"""Tensors and the structure start at multiples of this many bytes of the payload."""
EMPTY = -1
"""``completed_steps`` of an empty slot."""
NEVER_USED = "empty"
"""Reason of a slot in which nothing was ever saved, which is no damage."""
CUT_SHORT = "a save into it was cut short"
"""Reason of a slot into which a rank was saving when it ended, or saves at this moment."""
DAMAGED = "its contents do not match their checksum"
"""Reason of a slot whose payload is not what was saved."""

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
    """Why the agent wants a step kept; the order in which pins give way when slots are short."""

    KEEP = 0
    """The newest step with complete backups of all ranks, as far as known: a rank needs it when other ranks have to
    restore from their backups."""
    BACKUP = 1
    """Being sent to the peer; the next step is sent instead when it gives way."""
    NAMED = 2
    """The step that all machines back up together, pinned before it is saved, so that no save overwrites its slot."""
    DISK = 3
    """The step that is being written to disk. It gives way last, or steps that are sent would always displace it."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """The contents of a slot of a checkpoint file."""

    completed_steps: int
    """The state's number of completed steps; -1: the slot has no state."""
    generation: int
    """Generation of the job that saved it."""
    bytes: int
    """Tensors and structure together."""
    valid: bool
    reason: str = ""
    """Why it is not valid; empty when it is."""
    saved_ns: int = 0
    """When its rank committed it, nanoseconds of the wall clock."""


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header of a committed slot: what travels with its payload."""

    completed_steps: int
    generation: int
    tensor_bytes: int
    structure_bytes: int
    checksum: int
    """xxh3_64 of the payload, seeded with ``completed_steps``."""
    saved_ns: int

    @property
    def payload_bytes(self) -> int:
        """Tensors, padding and structure."""
        return aligned(self.tensor_bytes) + self.structure_bytes


def same_save(header: SlotHeader, saved_ns: int) -> bool:
    """Whether a slot of a rank's step has the wanted save, by its time; 0: any save will do.

    A rank saves a step again after the job went back before it, and in another run; no two saves
    have the same nanosecond, and a copy of a slot keeps its time. Generations do not tell saves apart,
    because a copy from another run gets a generation of the run that restores it.
    """
    return saved_ns in {0, header.saved_ns}


PINS = struct.Struct(f"<{len(Pin)}q")


def pins_of(mapped: mmap.mmap | bytes) -> list[int]:
    """The pinned step of each ``Pin``, -1: none; ``mapped`` begins where the file does."""
    return list(PINS.unpack_from(mapped, PINS_AT))


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``to``, bytes."""
    return -(-size // to) * to


def capacity_for(payload_bytes: int) -> int:
    """Capacity of each slot of a file that is made for such a payload, bytes.

    Some room more, so that a longer structure does not move the file again.
    """
    return aligned(payload_bytes + max(payload_bytes // 64, 16 * PAGE), PAGE)


def file_bytes(payload_bytes: int, slots: int) -> int:
    """Size of a file that is made for such a payload."""
    return PAGE + slots * (PAGE + capacity_for(payload_bytes))


def file_header(page: bytes) -> tuple[int, int, str]:
    """(slots, capacity in bytes, what is wrong with the file: empty when nothing)."""
    if len(page) < FILE.size + 8:
        return 0, 0, f"the file has {len(page)} bytes, less than its header"
    magic, version, slots, capacity = FILE.unpack_from(page)
    if magic != MAGIC or version != VERSION:
        return 0, 0, f"not a checkpoint file of version {VERSION}"
    if U64.unpack_from(page, FILE.size)[0] != xxhash.xxh3_64_intdigest(page[: FILE.size]):
        return 0, 0, "the file's header does not match its checksum"
    return slots, capacity, ""


def inspect_slot(page: bytes, room: int, chunks: Chunks | None) -> SlotInfo:
    """Check a slot by its header page, by the number of payload bytes, and with ``chunks`` also by its contents."""
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
"""Beginnings of the names of slot files; a rank follows."""


def own_slots(shm: Path, rank: int) -> Path:
    """The file of a rank's own slots; ``shm`` is the job's folder of the rank's machine."""
    return shm / f"{OWN}{rank}"


def backup_slots(shm: Path, rank: int) -> Path:
    """The file of the backups of a rank that another machine runs."""
    return shm / f"{BACKUP}{rank}"
