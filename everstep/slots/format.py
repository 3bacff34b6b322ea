"""Defines the format of a checkpoint file in shared memory: owner, slots, headers, pins and checksums.

Layout, little endian, every header and payload on a page boundary::

    0       magic 8s · version u32 · slots u32 · bytes of the owner u32 · 0 u32 · checksum u64
    64      pins: one i64 for each of ``Pin``, the pinned step or -1
    128     owner: the rank whose states the slots have, JSON (``SlotOwner``)
    4096    header page of slot 0, then those of slots 1, 2, …
    ...     payloads, each in the region of its slot

    slot header: 0 completed_steps i64 (-1: nothing) · 8 generation u32 · 12 phase u32 (0 unused, 1 a save is under
                 way, 2 saved) · 16 tensor_bytes u64 · 24 structure_bytes u64 · 32 checksum u64 · 40 saved_ns i64 ·
                 48 offset of the region in the file u64 · 56 bytes of the region u64 · 64 header checksum u64
    payload:     the tensors' bytes, then (64-byte aligned) the structure

A slot's region is as large as the largest state that was saved into it. The first save of a larger state gives its slot
another region, and the memory of the old one is freed at once. So the file grows slot by slot, and needs no memory
beyond that of its slots.

Checksums are xxh3_64. ``everstep/slots/checksum.py`` defines the one in the slot header, which covers the payload, the
completed steps and the owner. So a payload does not match the header of another step, rank, job or run. The other
checksums cover the fields before them, and that of the file also the owner. This module does not import torch, since
agents read these files too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import xxhash

from everstep.slots.owner import SlotOwner

MAGIC = b"EVSTCKP1"
VERSION = 3
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

MOST_ROOM = 16 << 20
"""Most bytes of a slot beyond its first payload."""

U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")
UNUSED, SAVING, SAVED = 0, 1, 2
MAX_SLOTS = 64
PINS_AT = 64
OWNER_AT = 128

_FILE = struct.Struct("<8sIIII")
_SLOT = struct.Struct("<qIIQQQqQQ")
SLOT_BYTES = _SLOT.size + U64.size
"""Bytes of a slot's header."""


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
    """``PayloadChecksum`` of the payload, for the file's owner and ``completed_steps``."""
    saved_ns: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors, padding and structure together."""
        return aligned(self.tensor_bytes) + self.structure_bytes


ANY_SAVE = range(0)
"""Stands for the time of any save."""


def same_save(header: SlotHeader, saved: range) -> bool:
    """Whether a slot has the save that was made within certain times.

    A rank may save the same step several times: after the job resumed from an earlier step, or in another run. The time
    identifies a save, since such saves are far apart and copies of a slot keep the time. The generation
    does not identify a save, because a copy from another run gets a generation of the run that restores it.

    Args:
        header: The header of the slot.
        saved: The times, nanoseconds, at which the wanted save may have been made; empty: any save.
    """
    return not saved or header.saved_ns in saved


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``to``, bytes."""
    return -(-size // to) * to


def capacity_for(payload_bytes: int) -> int:
    """Capacity of each slot, bytes, in a file that is made for payloads of ``payload_bytes``.

    A 64th part, but at least 64 KiB and at most ``MOST_ROOM``, is left over for what becomes longer from save to save:
    the structure, e.g. an object's list of past losses, and small tensors of other objects. Without this room, each
    such save would give its slot another region, and the kernel would free and clear all pages of the slot.
    """
    return aligned(payload_bytes + min(max(payload_bytes // 64, 16 * PAGE), MOST_ROOM), PAGE)


def file_bytes(payload_bytes: int, slots: int) -> int:
    """Bytes of memory that a file needs whose slots all have room for payloads of ``payload_bytes``."""
    return slot_at(slots) + slots * capacity_for(payload_bytes)


def slot_at(index: int) -> int:
    """Offset of a slot's header in the file; for the number of slots, the offset after the last header."""
    return PAGE + index * PAGE


def pack_file(slots: int, owner: SlotOwner) -> bytes:
    """The first page of a new file; no step is pinned."""
    text = owner.pack()
    fields = _FILE.pack(MAGIC, VERSION, slots, len(text), 0)
    head = (fields + U64.pack(xxhash.xxh3_64_intdigest(fields + text))).ljust(PINS_AT, b"\0")
    return ((head + I64.pack(EMPTY) * len(Pin)).ljust(OWNER_AT, b"\0") + text).ljust(PAGE, b"\0")


class FileHeader(NamedTuple):
    """The header of a file."""

    slots: int
    owner: SlotOwner
    problem: str = ""
    """What is wrong with the file; empty: it is correct."""


def file_header(page: bytes, owner: SlotOwner | None = None) -> FileHeader:
    """Read and check the header of a file.

    Args:
        page: The first page of the file.
        owner: The owner that the file must have; None: any owner.
    """

    def broken(problem: str) -> FileHeader:
        return FileHeader(0, SlotOwner("", "", 0), problem)

    if len(page) < PAGE:
        return broken(f"the file has {len(page)} bytes, less than its header")
    magic, version, slots, length, _ = _FILE.unpack_from(page)
    if magic != MAGIC or version != VERSION:
        return broken(f"not a checkpoint file of version {VERSION}")
    text = page[OWNER_AT : OWNER_AT + length]
    if U64.unpack_from(page, _FILE.size)[0] != xxhash.xxh3_64_intdigest(page[: _FILE.size] + text):
        return broken("the file's header does not match its checksum")
    actual = SlotOwner.parse(text)
    if owner is not None and actual != owner:
        return broken(f"it has the state of {actual}, and not of {owner}")
    return FileHeader(slots, actual)


class StoredSlot(NamedTuple):
    """A slot's header as it is in the file. If it is not ``intact``, any field may be wrong."""

    completed_steps: int = EMPTY
    generation: int = 0
    phase: int = UNUSED
    tensor_bytes: int = 0
    structure_bytes: int = 0
    checksum: int = 0
    saved_ns: int = 0
    at: int = 0
    """Offset of the payload in the file."""
    room: int = 0
    """Bytes of the file that the payload may have."""
    intact: bool = True
    """Whether the header matches its checksum."""

    @classmethod
    def unpack(cls, page: bytes) -> StoredSlot:
        """The header at the beginning of ``page``, which has at least ``SLOT_BYTES``."""
        checksum = U64.unpack_from(page, _SLOT.size)[0]
        return cls._make((*_SLOT.unpack_from(page), checksum == xxhash.xxh3_64_intdigest(page[: _SLOT.size])))

    def pack(self) -> bytes:
        """The bytes of the header."""
        fields = _SLOT.pack(*self[:-1])
        return fields + U64.pack(xxhash.xxh3_64_intdigest(fields))

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensors, padding and structure together."""
        return aligned(self.tensor_bytes) + self.structure_bytes

    def header(self) -> SlotHeader | None:
        """The header as it is sent; None: the slot is not committed, or its header is damaged."""
        if self.completed_steps < 0 or self.phase != SAVED or not self.intact:
            return None
        return SlotHeader(*self[:2], *self[3:7])


def inspect_slot(slot: StoredSlot, there: int, checksum: Callable[[], int] | None) -> SlotInfo:
    """Check a slot.

    Args:
        slot: The slot's header.
        there: Number of bytes of the payload that the file has.
        checksum: Computes the checksum of the slot's payload; None: the contents are not checked.
    """
    steps, used = slot.completed_steps, slot.payload_bytes

    def broken(reason: str) -> SlotInfo:
        return SlotInfo(steps, slot.generation, used, False, reason, slot.saved_ns)

    if steps == EMPTY:
        return broken(NEVER_USED if slot.phase == UNUSED else CUT_SHORT)
    if slot.header() is None:
        return broken("its header does not match its checksum")
    if used > there:
        return broken(f"truncated: {max(there, 0)} of {used} bytes are there")
    if checksum is not None and checksum() != slot.checksum:
        return broken(DAMAGED)
    return SlotInfo(steps, slot.generation, used, True, saved_ns=slot.saved_ns)


OWN, BACKUP = "checkpoint-", "backup-"
"""Beginnings of the names of slot files; the number of the rank follows."""


def own_slots(shm: Path, rank: int) -> Path:
    """The file of a rank's own slots; ``shm`` is the job's folder in the machine's shared memory."""
    return shm / f"{OWN}{rank}"


def backup_slots(shm: Path, rank: int) -> Path:
    """The file of the backups of a rank that another machine runs."""
    return shm / f"{BACKUP}{rank}"
