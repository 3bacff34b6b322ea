"""Maps the file of a rank's slots into memory, opens it after a kill, and lets it grow.

The memory of a file is allocated slot by slot. A slot is *allocated* before it is written to, so that a full file
system causes an error then, and not a SIGBUS later. Headers are allocated when the file is made. The file does not
record which bytes are allocated: a committed slot is allocated up to the end of its payload.

Each slot has a *region* of the file, which is mapped separately. If a state does not fit, the slot of the save gets a
larger region. The memory of its old region is freed before the new one is allocated. No other slot is touched, and
nothing is copied. To free and to allocate takes seconds for large slots, so a thread other than the script's does both.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.base.text import size_text
from everstep.errors import CheckpointError
from everstep.slots.footprint import larger_shm
from everstep.slots.format import (
    EMPTY,
    I64,
    MAX_SLOTS,
    PAGE,
    SLOT_BYTES,
    StoredSlot,
    capacity_for,
    file_bytes,
    file_header,
    inspect_slot,
    pack_file,
    slot_at,
)
from everstep.slots.owner import SlotOwner
from everstep.system import private_files as private
from everstep.system.pages import WRITE, populate
from everstep.system.shared_words import SharedWords


@dataclass(slots=True)
class Region:
    """The part of a file that has the payload of a slot."""

    at: int = 0
    """Offset in the file."""
    room: int = 0
    """Bytes of the region; 0: the slot was never used."""
    memory: mmap.mmap | None = None
    allocated: int = 0
    """Bytes from its beginning on that may be written to."""
    present: int = 0
    """Bytes from its beginning on whose pages are present."""

    def fits(self, payload_bytes: int) -> bool:
        """Whether a payload has room in the region."""
        return self.memory is not None and payload_bytes <= self.room

    @property
    def address(self) -> int:
        """Address of the region."""
        assert self.memory is not None
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class SlotMapping:
    """A checkpoint file in this process's memory, for its writer.

    Args:
        path: The file; it need not exist yet.
        slots: Number of slots of a new file. An existing file keeps its own number.
        owner: The rank whose states the slots have.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: Path, slots: int, owner: SlotOwner) -> None:
        self.path = path
        self.slots = slots
        self.owner = owner
        self.mapping = 0
        """It is increased when a slot is mapped anew. Views and addresses of before must not be used then."""
        self.before_free: Callable[[int], None] = lambda address: None
        """Called with an address at which a slot was before it grew, before the memory there is freed; CUDA has to
        unregister it."""
        self._headers: mmap.mmap | None = None
        self._words: SharedWords | None = None
        self._descriptor = -1
        self._memory = threading.Lock()
        """The lock for allocating memory, for making it present, and for changing the mapping."""
        self._regions = [Region() for _ in range(slots)]
        self._replaced: list[Region] = []
        """Regions that slots had before they grew, whose memory is not freed yet."""
        self._steps = [EMPTY] * slots
        self._damage: list[str] = []
        try:
            with contextlib.suppress(FileNotFoundError):
                self._open()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}. Free space or delete the file") from error

    @property
    def is_mapped(self) -> bool:
        """Whether there is a file, and it is mapped."""
        return self._headers is not None

    def missing(self, payload_bytes: int) -> int:
        """Bytes that are not allocated yet, of a file whose slots all have room for such a payload."""
        if not self.is_mapped:
            return file_bytes(payload_bytes, self.slots)
        return sum(
            (region.room if region.fits(payload_bytes) else capacity_for(payload_bytes)) - region.allocated
            for region in self._regions
        )

    def close(self) -> None:
        """Unmap the file, which is kept. Memory of views that still exist is unmapped together with them."""
        with self._memory:
            self._unmap()
        self._steps = [EMPTY] * self.slots

    def _unmap(self) -> None:
        if self._headers is None or self._words is None:
            return
        self._words.release()
        self._headers.close()
        for region in (*self._regions, *self._replaced):
            _unmap(region)
        self._replaced.clear()
        os.close(self._descriptor)
        self._headers, self._words, self._descriptor = None, None, -1
        self._regions = [Region() for _ in range(self.slots)]

    # Headers.

    def _stored(self, index: int) -> StoredSlot:
        """A slot's header."""
        at = slot_at(index)
        return StoredSlot.unpack(self._mapped()[at : at + SLOT_BYTES])

    def _store(self, index: int, slot: StoredSlot) -> None:
        """Write a slot's header; the number of completed steps is the first or the last word that changes.

        So after a kill at any moment the slot is empty, or the header is complete.
        """
        mapped, at, packed = self._mapped(), slot_at(index), slot.pack()
        assert self._words is not None
        self._words.set(at, EMPTY)
        mapped[at + I64.size : at + SLOT_BYTES] = packed[I64.size :]
        self._words.set(at, slot.completed_steps)  # after this store the slot counts
        self._steps[index] = slot.completed_steps

    def _mapped(self) -> mmap.mmap:
        if self._headers is None:
            raise CheckpointError(f"{self.path} is closed")
        return self._headers

    # Opening.

    def _open(self) -> None:
        with open(self.path, "r+b", buffering=0, opener=private.open_file) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            header = file_header(file.read(PAGE), self.owner)
            if header.problem or not 2 <= header.slots <= MAX_SLOTS:
                self._damage.append(header.problem or f"it has {header.slots} slots")
                return  # ``load`` reports it, and the next save replaces the file
            if size < slot_at(header.slots):
                self._damage.append(f"the file ends at byte {size}, in its headers")
            os.posix_fallocate(descriptor, 0, slot_at(header.slots))  # headers that are missing become zeros
            self.slots = header.slots
            self._adopt(os.dup(descriptor))
        stored = [self._stored(index) for index in range(self.slots)]
        regions = _regions(stored, slot_at(self.slots))
        end = max(region.at + region.room for region in regions)
        rooms = slot_at(self.slots) + sum(region.room for region in regions)
        full = size >= end and os.fstat(self._descriptor).st_blocks * 512 >= rooms
        self._reach(end)
        for index, (slot, region) in enumerate(zip(stored, regions, strict=True)):
            info = inspect_slot(slot, min(region.room, size - region.at), None)
            if info.valid:
                self._steps[index] = info.completed_steps
                region.allocated = info.bytes
            elif info.completed_steps != EMPTY:
                self._damage.append(f"slot {index}: {info.reason}")
            if full:
                region.allocated = region.room
            self._map_region(index, region)
        self._free_gaps()

    def _adopt(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._headers = mmap.mmap(descriptor, slot_at(self.slots))
        self._words = SharedWords(self._headers)
        self._regions = [Region() for _ in range(self.slots)]
        self._steps = [EMPTY] * self.slots
        self.mapping += 1

    def _make(self) -> None:
        """Make a file without regions; it replaces a damaged one."""
        new = self.path.with_name(self.path.name + ".new")
        descriptor = private.open_file(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            with self._room(0, descriptor):
                os.posix_fallocate(descriptor, 0, slot_at(self.slots))
            os.pwrite(descriptor, pack_file(self.slots, self.owner), 0)
            for index in range(self.slots):
                os.pwrite(descriptor, StoredSlot().pack(), slot_at(index))
            new.rename(self.path)
        except BaseException:
            os.close(descriptor)
            new.unlink()
            raise
        self._adopt(descriptor)

    # Memory.

    def _extend(self, region: Region, stop: int, *, present: bool = False) -> None:
        """Allocate the first ``stop`` bytes of a region; if ``present``, make their pages present.

        Nothing happens if the slot has grown and has another region meanwhile.

        Raises:
            CheckpointError: the file system has no room.
        """
        if region.allocated >= stop and not present:
            return  # without the lock, which the copying thread may hold for another slot
        with self._memory:
            self._free_replaced()
            stop = min(stop, region.room)
            if region.allocated < stop:
                # Allocating a page that already exists keeps its contents.
                with self._room(region.room, self._descriptor):
                    os.posix_fallocate(self._descriptor, region.at + region.allocated, stop - region.allocated)
                region.allocated = stop
            if present and region.present < stop:
                populate(region.address + region.present, stop - region.present, WRITE)
                region.present = stop

    def _allocate_parts(self, region: Region, parts: Iterable[tuple[int, int]]) -> None:
        """Allocate parts of a region, offset and size of each; nothing happens if they are allocated."""
        for at, size in parts if region.allocated < region.room else ():
            if size:
                with self._room(size, self._descriptor):
                    os.posix_fallocate(self._descriptor, region.at + at, size)

    def _free_replaced(self) -> None:
        """Free the memory of regions that slots had before they grew; the caller has the lock."""
        for region in self._replaced:
            if region.memory is not None:
                self.before_free(region.address)
                region.memory.madvise(mmap.MADV_REMOVE)
                _unmap(region)
        self._replaced.clear()

    def _grow(self, index: int, payload_bytes: int) -> None:
        """Give a slot, and all other empty slots, a region with room for a payload; the slot's state is lost.

        No memory is allocated, and that of the old region is freed as soon as some is (``_extend``). So the file
        never needs more memory than its slots. After a kill at any moment, all other slots are as before. Memory that
        then belongs to no slot is freed when the file is opened again.

        Raises:
            CheckpointError: there is no room for all slots with such payloads, and no slot has changed.
        """
        with self._memory:
            missing = self.missing(payload_bytes)
            with self._room(missing, self._descriptor):
                if missing > _free(self._descriptor):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            others = [other for other, steps in enumerate(self._steps) if steps == EMPTY and other != index]
            for slot in (index, *others):
                if not self._regions[slot].fits(payload_bytes):
                    self._replace_region(slot, capacity_for(payload_bytes))
            self.mapping += 1

    def _replace_region(self, index: int, size: int) -> None:
        """Give a slot an empty region, which is not allocated."""
        self._store(index, StoredSlot())
        old, self._regions[index] = self._regions[index], Region()
        if old.memory is not None:
            self._replaced.append(old)
        region = Region(_place([*self._regions, *self._replaced], size, slot_at(self.slots)), size)
        self._reach(region.at + region.room)
        self._store(index, StoredSlot(at=region.at, room=region.room))
        self._map_region(index, region)

    def _reach(self, end: int) -> None:
        """Make the file at least ``end`` bytes long, without memory."""
        if os.fstat(self._descriptor).st_size < end:
            with self._room(end, self._descriptor):
                os.ftruncate(self._descriptor, end)

    def _map_region(self, index: int, region: Region) -> None:
        if region.room:
            region.memory = mmap.mmap(self._descriptor, region.room, offset=region.at)
        self._regions[index] = region

    def _free_gaps(self) -> None:
        """Free memory that belongs to no slot, since a process was killed while it gave a slot another region."""
        ends = sorted((region.at, region.at + region.room) for region in self._regions if region.room)
        done = slot_at(self.slots)
        for begin, end in (*ends, (os.fstat(self._descriptor).st_size // PAGE * PAGE, 0)):
            if begin > done:
                with mmap.mmap(self._descriptor, begin - done, offset=done) as gap:
                    gap.madvise(mmap.MADV_REMOVE)
            done = max(done, end)

    @contextlib.contextmanager
    def _room(self, size: int, descriptor: int) -> Iterator[None]:
        """Turn an error for lack of room into a ``CheckpointError`` with numbers; ``size`` is what is needed, bytes."""
        try:
            yield
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EFBIG, errno.ENOMEM}:
                raise
            status = os.fstatvfs(descriptor)
            advice = larger_shm(status.f_blocks * status.f_frsize + size)
            raise CheckpointError(
                f"no room for checkpoints in {self.path.parent}: {self.path.name} needs {size_text(size)} more, and "
                f"{size_text(_free(descriptor))} are free. What helps: {advice}, use fewer slots, or shard the state "
                "over more ranks"
            ) from error


def _regions(stored: list[StoredSlot], first: int) -> list[Region]:
    """The regions of the slots; a slot whose header is damaged, or names a region of another slot, gets none."""
    regions = [Region() for _ in stored]
    for index in sorted(range(len(stored)), key=lambda index: stored[index].at):
        slot = stored[index]
        if slot.intact and slot.room and slot.at >= first:
            regions[index] = Region(slot.at, slot.room)
            first = slot.at + slot.room
    return regions


def _place(regions: list[Region], size: int, first: int) -> int:
    """The first offset from ``first`` on at which ``size`` bytes belong to no region."""
    for begin, end in sorted((region.at, region.at + region.room) for region in regions if region.room):
        if first + size <= begin:
            break
        first = end
    return first


def _unmap(region: Region) -> None:
    """Unmap a region; while views of it exist, its memory stays mapped."""
    if region.memory is not None:
        with contextlib.suppress(BufferError):
            region.memory.close()
    region.memory, region.room, region.allocated, region.present = None, 0, 0, 0


def _free(descriptor: int) -> float:
    """Free bytes of a file's file system; infinite for a file system without a limit."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize if status.f_blocks else math.inf
