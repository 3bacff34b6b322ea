"""The checkpoint file of one rank: slots in shared memory that outlive the rank.

A file in ``/dev/shm`` holds N slots, each the state of the rank after some
number of completed steps. A save goes into the slot that is needed least; the
slot's header is cleared first and committed last, so that a kill in the middle
never costs the step before. Two slots suffice while the copy blocks the step
and every step has a collective that all ranks enter: no rank can then be more
than one step ahead of another. An overlapped copy needs three.

Layout, little endian, every part on a page boundary::

    0       magic 8s · version u32 · slots u32 · capacity u64 · checksum u64
    4096    slot 0: header page, then ``capacity`` bytes of payload
    ...     slot 1, 2, …

    slot header: completed_steps i64 · generation u32 · phase u32 · tensor_bytes u64 ·
                 structure_bytes u64 · checksum u64 · saved_ns i64 · header checksum u64
    payload:     the tensors' bytes, then (64-byte aligned) the structure

Checksums are xxh3_64: the one in the header covers the payload, the header's
own covers the fields before it. No torch here: the agent reads these files too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from everstep.errors import CheckpointError, CorruptCheckpoint

MAGIC = b"EVSTCKP1"
VERSION = 1
PAGE = 4096
ALIGNMENT = 64
"""Tensors and the structure start at multiples of this many bytes of the payload."""
EMPTY = -1
"""``completed_steps`` of a slot that holds nothing."""

_FILE = struct.Struct("<8sIIQ")
_SLOT = struct.Struct("<qIIQQQq")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_UNUSED, _SAVING, _SAVED = 0, 1, 2
_CHUNK = 1 << 20
_MAX_SLOTS = 64

_Chunks = Callable[[int], Iterable[memoryview]]


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """What one slot of a checkpoint file holds."""

    completed_steps: int
    """The state is the one after this many completed steps; -1: the header holds no step."""
    generation: int
    """Generation of the job that saved it."""
    bytes: int
    """Tensors and structure together."""
    valid: bool
    reason: str = ""
    """Why it is not valid; empty when it is."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The contents of a committed slot."""

    completed_steps: int
    generation: int
    tensors: memoryview
    """A view of the mapped file: copy before keeping anything of it."""
    structure: bytes


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """``size`` rounded up to a multiple of ``to``, bytes."""
    return -(-size // to) * to


class SlotFile:
    """The writer's side of a checkpoint file. One process writes; saves do not nest.

    Args:
        path: The file; made at the first save when it does not exist.
        slots: Number of slots of a new file, 2 to 64. An existing file keeps its own number.
        generation: Generation of the job that this process belongs to.

    Raises:
        CheckpointError: too few or too many slots, or the file cannot be opened.
    """

    def __init__(self, path: Path, *, slots: int = 2, generation: int = 0) -> None:
        if not 2 <= slots <= _MAX_SLOTS:
            raise CheckpointError(f"{slots} checkpoint slots: use 2 to {_MAX_SLOTS}; with one, a kill loses everything")
        self.path = path
        self.slots = slots
        self.generation = generation
        self.capacity = 0
        self.mapping = 0
        """Counts the mappings: views and addresses that were taken in an earlier one are stale."""
        self._map: mmap.mmap | None = None
        self._base = 0
        self._steps = [EMPTY] * slots
        self._damage: list[str] = []
        self._saving: tuple[int, int, int] | None = None
        try:
            with contextlib.suppress(FileNotFoundError):
                self._growing.unlink()  # left by a kill in the middle of a growth
            with contextlib.suppress(FileNotFoundError):
                self._open()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}. Free space or delete the file") from error

    # Saving.

    def begin(self, structure: bytes, tensor_bytes: int) -> int:
        """Start a save: take the least needed slot, clear its header, store the structure.

        The file is made, or grown without losing a committed slot, when the
        state does not fit.

        Returns:
            Address of ``tensor_bytes`` writable bytes, valid until ``commit``.

        Raises:
            CheckpointError: the file system has no room; the committed slots are untouched.
        """
        need = aligned(tensor_bytes) + len(structure)
        if self._map is None or need > self.capacity:
            self._grow(need)
        mapped = self._mapped()
        index = self._steps.index(min(self._steps))  # an empty slot, else the oldest step
        at = self._slot_at(index)
        _I64.pack_into(mapped, at, EMPTY)
        _SLOT.pack_into(mapped, at, EMPTY, self.generation, _SAVING, tensor_bytes, len(structure), 0, 0)
        self._steps[index] = EMPTY
        start = at + PAGE + aligned(tensor_bytes)
        mapped[start : start + len(structure)] = structure
        self._saving = (index, tensor_bytes, len(structure))
        return self._base + at + PAGE

    def tensors(self) -> memoryview:
        """The writable tensor bytes of the save that has begun, as a view of the mapping."""
        index, tensor_bytes, _ = self._begun()
        at = self._slot_at(index) + PAGE
        return memoryview(self._mapped())[at : at + tensor_bytes]

    def commit(self, completed_steps: int) -> None:
        """End the save: checksum, then the header, its step count last.

        Raises:
            CheckpointError: no save has begun, or the count is negative.
        """
        index, tensor_bytes, structure_bytes = self._begun()
        if completed_steps < 0:
            raise CheckpointError(f"cannot save a state after {completed_steps} steps: the count starts at 0")
        mapped, at = self._mapped(), self._slot_at(index)
        with memoryview(mapped) as view:
            checksum = xxhash.xxh3_64_intdigest(view[at + PAGE : at + PAGE + aligned(tensor_bytes) + structure_bytes])
        header = _SLOT.pack(
            completed_steps, self.generation, _SAVED, tensor_bytes, structure_bytes, checksum, time.time_ns()
        )
        mapped[at + 8 : at + _SLOT.size] = header[8:]
        _U64.pack_into(mapped, at + _SLOT.size, xxhash.xxh3_64_intdigest(header))
        _I64.pack_into(mapped, at, completed_steps)  # one aligned store: from here on the slot counts
        self._steps[index] = completed_steps
        self._saving = None

    def discard_after(self, completed_steps: int) -> None:
        """Forget slots of later steps.

        A run that goes on from step S computes the later steps anew; a slot of
        the abandoned future must never be combined with slots of the new one.
        """
        for index, steps in enumerate(self._steps):
            if steps > completed_steps:
                _I64.pack_into(self._mapped(), self._slot_at(index), EMPTY)
                _SLOT.pack_into(self._mapped(), self._slot_at(index), EMPTY, 0, _UNUSED, 0, 0, 0, 0)
                self._steps[index] = EMPTY

    # Loading.

    def load(self, completed_steps: int) -> Payload:
        """The state after so many completed steps, verified.

        Raises:
            CheckpointError: no slot holds that step.
            CorruptCheckpoint: the slot's header, length or checksum does not hold.
        """
        if completed_steps < 0 or completed_steps not in self._steps:
            here = ", ".join(map(str, sorted(step for step in self._steps if step >= 0))) or "none"
            message = f"{self.path} does not hold the state after step {completed_steps} (it holds: {here})"
            if self._damage:
                raise CorruptCheckpoint(
                    f"{message}; it is damaged: {'; '.join(self._damage)}. Start from an older step"
                )
            raise CheckpointError(f"{message}. Start from a step that all ranks hold, or from the beginning")
        mapped, at = self._mapped(), self._slot_at(self._steps.index(completed_steps))
        view = memoryview(mapped)[at + PAGE : at + PAGE + self.capacity]
        info = _inspect(mapped[at : at + PAGE], self.capacity, lambda count: [view[:count]])
        if not info.valid:
            raise CorruptCheckpoint(
                f"{self.path}: the state after step {completed_steps} is damaged: {info.reason}. "
                "Start from an older step, or from the beginning"
            )
        _, generation, _, tensor_bytes, structure_bytes, _, _ = _SLOT.unpack_from(mapped, at)
        start = aligned(tensor_bytes)
        structure = bytes(view[start : start + structure_bytes])
        return Payload(completed_steps, generation, view[:tensor_bytes], structure)

    def close(self) -> None:
        """Unmap the file, which stays; memory under views that are still held goes when they do."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
        self._map, self._saving, self.capacity = None, None, 0
        self._steps = [EMPTY] * self.slots

    # The file.

    @property
    def _growing(self) -> Path:
        return self.path.with_name(self.path.name + ".growing")

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise CheckpointError(f"{self.path} is closed")
        return self._map

    def _begun(self) -> tuple[int, int, int]:
        if self._saving is None:
            raise CheckpointError(f"{self.path}: no save has begun, call begin() first")
        return self._saving

    def _slot_at(self, index: int) -> int:
        return PAGE + index * (PAGE + self.capacity)

    def _open(self) -> None:
        with self.path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            slots, capacity, reason = _file_header(file.read(PAGE))
            if reason:
                self._damage.append(reason)  # a load says so; the next save replaces the file
                return
            whole = PAGE + slots * (PAGE + capacity)
            if size < whole:
                # Zeros for what is missing: the slots that are whole stay usable, and no access ends in SIGBUS.
                self._damage.append(f"the file ends at byte {size} of {whole}")
                os.posix_fallocate(file.fileno(), 0, whole)
            self.slots, self.capacity = slots, capacity
            self._adopt(mmap.mmap(file.fileno(), whole))
        self._steps = [EMPTY] * slots
        for index in range(slots):
            at = self._slot_at(index)
            info = _inspect(self._mapped()[at : at + PAGE], capacity, None)
            if info.valid:
                self._steps[index] = info.completed_steps
            elif info.completed_steps != EMPTY:
                self._damage.append(f"slot {index}: {info.reason}")

    def _adopt(self, mapped: mmap.mmap) -> None:
        self._map = mapped
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.mapping += 1

    def _grow(self, need: int) -> None:
        """Put a larger file with the same committed slots in this one's place, atomically."""
        old, offsets = self._map, [self._slot_at(index) for index in range(self.slots)]
        # Some room more, so that a longer structure does not move the file again.
        capacity = aligned(need + max(need // 64, 16 * PAGE), PAGE)
        fresh = _allocate(self._growing, PAGE + self.slots * (PAGE + capacity))
        header = _FILE.pack(MAGIC, VERSION, self.slots, capacity)
        fresh[: len(header)] = header
        _U64.pack_into(fresh, len(header), xxhash.xxh3_64_intdigest(header))
        self.capacity = capacity
        for index, (steps, start) in enumerate(zip(self._steps, offsets, strict=True)):
            at = self._slot_at(index)
            if old is not None and steps >= 0:
                _, _, _, tensor_bytes, structure_bytes, _, _ = _SLOT.unpack_from(old, start)
                used = PAGE + aligned(tensor_bytes) + structure_bytes
                fresh[at : at + used] = old[start : start + used]
            else:
                _SLOT.pack_into(fresh, at, EMPTY, 0, _UNUSED, 0, 0, 0, 0)
        self._growing.rename(self.path)
        if old is not None:
            with contextlib.suppress(BufferError):
                old.close()
        self._adopt(fresh)


def held(path: Path, *, verify: bool = True) -> list[SlotInfo]:
    """What a checkpoint file holds, one entry per slot; damage gives reasons, never an exception.

    The file is read, not mapped, so that a truncation meanwhile cannot kill
    the reader with SIGBUS. A missing file holds nothing: an empty list.

    Args:
        path: The file.
        verify: Read everything and compare checksums; else look at headers and lengths only.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            slots, capacity, reason = _file_header(file.read(PAGE))
            if reason:
                return [SlotInfo(EMPTY, 0, 0, False, reason)]
            starts = [PAGE + index * (PAGE + capacity) for index in range(slots)]
            return [_held_slot(file.fileno(), at, capacity, size, verify) for at in starts]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [SlotInfo(EMPTY, 0, 0, False, f"{path} cannot be read: {error}")]


def _held_slot(descriptor: int, at: int, capacity: int, size: int, verify: bool) -> SlotInfo:
    """One slot, read chunk by chunk so that a checkpoint of many GB costs no memory."""
    page = os.pread(descriptor, PAGE, at)
    if len(page) < PAGE:
        return SlotInfo(EMPTY, 0, 0, False, f"the file ends at byte {size}, before this slot's header")

    def chunks(count: int) -> Iterator[memoryview]:
        buffer, done = memoryview(bytearray(min(count, _CHUNK))), 0
        while done < count and (got := os.preadv(descriptor, [buffer[: count - done]], at + PAGE + done)):
            yield buffer[:got]
            done += got

    return _inspect(page, min(capacity, max(0, size - at - PAGE)), chunks if verify else None)


def _file_header(page: bytes) -> tuple[int, int, str]:
    """(slots, capacity in bytes, what is wrong with the file: empty when nothing)."""
    if len(page) < _FILE.size + 8:
        return 0, 0, f"the file has {len(page)} bytes, less than its header"
    magic, version, slots, capacity = _FILE.unpack_from(page)
    if magic != MAGIC or version != VERSION:
        return 0, 0, f"not a checkpoint file of version {VERSION}"
    if _U64.unpack_from(page, _FILE.size)[0] != xxhash.xxh3_64_intdigest(page[: _FILE.size]):
        return 0, 0, "the file's header does not match its checksum"
    return slots, capacity, ""


def _inspect(page: bytes, room: int, chunks: _Chunks | None) -> SlotInfo:
    """Judge a slot by its header page, the payload bytes that exist and, given ``chunks``, its contents."""
    steps, generation, phase, tensor_bytes, structure_bytes, checksum, _ = _SLOT.unpack_from(page)
    used = aligned(tensor_bytes) + structure_bytes

    def broken(reason: str, at_steps: int = steps) -> SlotInfo:
        return SlotInfo(at_steps, generation, used, False, reason)

    if steps == EMPTY:
        return broken("a save into it was cut short" if phase in {_SAVING, _SAVED} else "empty")
    if steps < 0 or _U64.unpack_from(page, _SLOT.size)[0] != xxhash.xxh3_64_intdigest(page[: _SLOT.size]):
        return broken("its header does not match its checksum")
    if used > room:
        return broken(f"truncated: {room} of {used} bytes are there")
    if chunks is not None:
        digest = xxhash.xxh3_64()
        for chunk in chunks(used):
            digest.update(chunk)
        if digest.intdigest() != checksum:
            return broken("its contents do not match their checksum")
    return SlotInfo(steps, generation, used, True)


def _allocate(path: Path, size: int) -> mmap.mmap:
    """A new mapped file, all of it allocated: a full file system is an error now, not a SIGBUS later."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        free = os.fstatvfs(descriptor)
        path.unlink()
        if error.errno not in {errno.ENOSPC, errno.EFBIG, errno.ENOMEM}:
            raise
        raise CheckpointError(
            f"no room for a checkpoint file of {size / 1e6:.1f} MB in {path.parent}: "
            f"{free.f_bavail * free.f_frsize / 1e6:.1f} MB are free. "
            "Make /dev/shm larger, use fewer slots, or shard the state over more ranks"
        ) from error
    finally:
        os.close(descriptor)
