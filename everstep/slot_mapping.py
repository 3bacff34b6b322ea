"""The file under a rank's slots: mapped, opened after a kill, grown in place."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from everstep.errors import CheckpointError
from everstep.slot_format import (
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
        """Counts the mappings: views and addresses that were taken in an earlier one are stale."""
        self.before_unmap: Callable[[], None] = lambda: None
        """Called before memory is unmapped, by whoever is about to; for those who registered it somewhere."""
        self._map: mmap.mmap | None = None
        self._base = 0
        self._steps = [EMPTY] * slots
        self._damage: list[str] = []
        try:
            with contextlib.suppress(FileNotFoundError):
                self._growing.unlink()  # left by a kill in the middle of a growth
            with contextlib.suppress(FileNotFoundError):
                self._open()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}. Free space or delete the file") from error

    @property
    def region(self) -> tuple[int, int]:
        """Address and length of the mapped file; zeros while nothing is mapped."""
        return (self._base, len(self._map)) if self._map is not None else (0, 0)

    def close(self) -> None:
        """Unmap the file, which stays; memory under views that are still held goes when they do."""
        if self._map is not None:
            self.before_unmap()
            with contextlib.suppress(BufferError):
                self._map.close()
        self._map, self.capacity = None, 0
        self._steps = [EMPTY] * self.slots

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
        with self.path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            slots, capacity, reason = file_header(file.read(PAGE))
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
            info = inspect_slot(self._mapped()[at : at + PAGE], capacity, None)
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
        capacity = capacity_for(need)
        fresh = _allocate(self._growing, file_bytes(need, self.slots))
        header = FILE.pack(MAGIC, VERSION, self.slots, capacity)
        fresh[: len(header)] = header
        U64.pack_into(fresh, len(header), xxhash.xxh3_64_intdigest(header))
        PINS.pack_into(fresh, PINS_AT, *(pins_of(old) if old is not None else [EMPTY] * len(Pin)))
        self.capacity = capacity
        for index, (steps, start) in enumerate(zip(self._steps, offsets, strict=True)):
            at = self._slot_at(index)
            if old is not None and steps >= 0:
                _, _, _, tensor_bytes, structure_bytes, _, _ = SLOT.unpack_from(old, start)
                used = PAGE + aligned(tensor_bytes) + structure_bytes
                fresh[at : at + used] = old[start : start + used]
            else:
                SLOT.pack_into(fresh, at, EMPTY, 0, UNUSED, 0, 0, 0, 0)
        self._growing.rename(self.path)
        if old is not None:
            self.before_unmap()
            with contextlib.suppress(BufferError):
                old.close()
        self._adopt(fresh)


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
