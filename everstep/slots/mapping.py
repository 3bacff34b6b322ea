"""Maps the file of a rank's slots into memory, opens it after a kill, and lets it grow.

A file gets its full length when it is made, but its memory is allocated slot by slot. A slot is *allocated* before it
is written to, so that a full file system causes an error then, and not a SIGBUS later. Headers are allocated when the
file is made or opened. The file does not record which bytes are allocated: a committed slot is allocated up to the end
of its payload.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from everstep.base.text import size_text
from everstep.errors import CheckpointError
from everstep.slots.format import (
    EMPTY,
    FILE,
    MAGIC,
    PAGE,
    PINS,
    PINS_AT,
    SLOT,
    U64,
    UNUSED,
    VERSION,
    Pin,
    aligned,
    capacity_for,
    file_bytes,
    file_header,
    inspect_slot,
    pins_of,
)
from everstep.system import private_files as private
from everstep.system.pages import STRIDE, WRITE, populate


class SlotMapping:
    """A checkpoint file in this process's memory, for its writer.

    Args:
        path: The file; it need not exist yet.
        slots: Number of slots of a new file. An existing file keeps its own number.

    Raises:
        CheckpointError: the file cannot be opened.
    """

    def __init__(self, path: Path, slots: int) -> None:
        self.path = path
        self.slots = slots
        self.capacity = 0
        self.mapping = 0
        """Number of the mapping. Views and addresses of an earlier mapping must not be used."""
        self.before_unmap: Callable[[], None] = lambda: None
        """Called before memory is unmapped, so that CUDA can unregister it."""
        self._map: mmap.mmap | None = None
        self._base = 0
        self._descriptor = -1
        self._memory = threading.Lock()
        """The lock for allocating memory, for making it present, and for changing the mapping."""
        self._allocated: list[int] = []
        """Bytes of each slot, from its header on, that may be written to."""
        self._present: list[int] = []
        """Bytes of each slot, from its header on, whose pages are present."""
        self._steps = [EMPTY] * slots
        self._damage: list[str] = []
        try:
            with contextlib.suppress(FileNotFoundError):
                self._growing.unlink()  # left by a process that was killed while the file grew
            with contextlib.suppress(FileNotFoundError):
                self._open()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}. Free space or delete the file") from error

    @property
    def region(self) -> tuple[int, int]:
        """Address and length of the mapped file; zeros while nothing is mapped."""
        return (self._base, len(self._map)) if self._map is not None else (0, 0)

    @property
    def missing(self) -> int:
        """Bytes of the file that are not allocated yet."""
        return sum(PAGE + self.capacity - done for done in self._allocated)

    def prepare(self) -> bool:
        """Allocate a piece of a slot and map its pages, so that later saves do not wait for that.

        A separate thread calls this between saves; a call takes some ms.

        Returns:
            Whether to call it again. False if nothing is left to do, or if there is no room; in that case a save raises
            the error.
        """
        for index in range(len(self._present)):
            if self._present[index] < PAGE + self.capacity:
                try:
                    self._extend(index, self._present[index] + STRIDE, present=True)
                except (CheckpointError, OSError, IndexError):  # no room, or the file was closed meanwhile
                    return False
                return True
        return False

    def close(self) -> None:
        """Unmap the file, which is kept. Memory of views that still exist is unmapped together with them."""
        with self._memory:
            self._unmap()
            self.capacity = 0
        self._steps = [EMPTY] * self.slots

    def _unmap(self) -> None:
        if self._map is not None:
            self.before_unmap()
            with contextlib.suppress(BufferError):
                self._map.close()
            os.close(self._descriptor)
        self._map, self._descriptor = None, -1
        self._allocated, self._present = [], []

    @property
    def _growing(self) -> Path:
        return self.path.with_name(self.path.name + ".growing")

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise CheckpointError(f"{self.path} is closed")
        return self._map

    def _slot_at(self, index: int) -> int:
        return PAGE + index * (PAGE + self.capacity)

    def _open(self) -> None:
        with open(self.path, "r+b", buffering=0, opener=private.open_file) as file:
            status = os.fstat(file.fileno())
            slots, capacity, reason = file_header(file.read(PAGE))
            if reason:
                self._damage.append(reason)  # ``load`` reports it, and the next save replaces the file
                return
            expected = PAGE + slots * (PAGE + capacity)
            full = status.st_blocks * 512 >= expected
            if status.st_size < expected:
                # Zeros replace the missing bytes: complete slots stay usable, and no access ends in SIGBUS.
                self._damage.append(f"the file ends at byte {status.st_size} of {expected}")
                os.posix_fallocate(file.fileno(), 0, expected)
                full = True
            self.slots, self.capacity = slots, capacity
            if not full:
                self._allocate_headers(file.fileno())
            self._adopt(mmap.mmap(file.fileno(), expected), os.dup(file.fileno()))
        self._steps = [EMPTY] * slots
        for index in range(slots):
            at = self._slot_at(index)
            info = inspect_slot(self._mapped()[at : at + PAGE], capacity, None)
            if info.valid:
                self._steps[index] = info.completed_steps
                self._allocated[index] = PAGE + info.bytes
            elif info.completed_steps != EMPTY:
                self._damage.append(f"slot {index}: {info.reason}")
            if full:
                self._allocated[index] = PAGE + capacity

    def _adopt(self, mapped: mmap.mmap, descriptor: int) -> None:
        self._map, self._descriptor = mapped, descriptor
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._allocated, self._present = [PAGE] * self.slots, [0] * self.slots
        self.mapping += 1

    def _allocate_headers(self, descriptor: int) -> None:
        for index in range(self.slots):
            os.posix_fallocate(descriptor, self._slot_at(index), PAGE)

    def _extend(self, index: int, stop: int, *, present: bool = False) -> None:
        """Allocate the first ``stop`` bytes of a slot, header included; if ``present``, make their pages present.

        Raises:
            CheckpointError: the file system has no room.
        """
        if self._allocated[index] >= stop and not present:
            return  # without the lock, which the copying thread may hold for another slot
        with self._memory:
            stop = min(stop, PAGE + self.capacity)
            done, at = self._allocated[index], self._slot_at(index)
            if done < stop:
                # Allocating a page that already exists keeps its contents.
                with _room(self.path, self._descriptor, len(self._mapped())):
                    os.posix_fallocate(self._descriptor, at + done, stop - done)
                self._allocated[index] = stop
            done = self._present[index]
            if present and done < stop:
                populate(self._base + at + done, stop - done, WRITE)
                self._present[index] = stop

    def _grow(self, need: int) -> None:
        """Replace this file atomically by a larger one with the same committed slots; the caller has the lock."""
        old, offsets = self._map, [self._slot_at(index) for index in range(self.slots)]
        before, self.capacity = self.capacity, capacity_for(need)
        size = file_bytes(need, self.slots)
        used = [0] * self.slots
        for index, (steps, start) in enumerate(zip(self._steps, offsets, strict=True)):
            if old is not None and steps >= 0:
                _, _, _, tensor_bytes, structure_bytes, _, _ = SLOT.unpack_from(old, start)
                used[index] = PAGE + aligned(tensor_bytes) + structure_bytes
        descriptor = private.open_file(self._growing, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            with _room(self._growing, descriptor, size):
                if size > _free(descriptor):  # slots are allocated later, but there should be room for all of them
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.ftruncate(descriptor, size)
                os.posix_fallocate(descriptor, 0, PAGE)
                self._allocate_headers(descriptor)
                for index, count in enumerate(used):
                    if count:
                        os.posix_fallocate(descriptor, self._slot_at(index), count)
                fresh = mmap.mmap(descriptor, size)
        except BaseException:
            self.capacity = before
            os.close(descriptor)
            self._growing.unlink()
            raise
        header = FILE.pack(MAGIC, VERSION, self.slots, self.capacity)
        fresh[: len(header)] = header
        U64.pack_into(fresh, len(header), xxhash.xxh3_64_intdigest(header))
        PINS.pack_into(fresh, PINS_AT, *(pins_of(old) if old is not None else [EMPTY] * len(Pin)))
        for index, (count, start) in enumerate(zip(used, offsets, strict=True)):
            at = self._slot_at(index)
            if old is not None and count:
                fresh[at : at + count] = old[start : start + count]
            else:
                SLOT.pack_into(fresh, at, EMPTY, 0, UNUSED, 0, 0, 0, 0)
        self._growing.rename(self.path)
        self._unmap()
        self._adopt(fresh, descriptor)
        self._allocated = [count or PAGE for count in used]


@contextlib.contextmanager
def _room(path: Path, descriptor: int, size: int) -> Iterator[None]:
    """Turn an error for lack of room into a ``CheckpointError`` with numbers; ``size`` is the file's size, bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EFBIG, errno.ENOMEM}:
            raise
        raise CheckpointError(
            f"no room for a checkpoint file of {size_text(size)} in {path.parent}: "
            f"{size_text(_free(descriptor))} are free. "
            "Make /dev/shm larger, use fewer slots, or shard the state over more ranks"
        ) from error


def _free(descriptor: int) -> float:
    """Free bytes of a file's file system; infinite for a file system without a limit."""
    status = os.fstatvfs(descriptor)
    return status.f_bavail * status.f_frsize if status.f_blocks else math.inf
