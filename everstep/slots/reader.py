"""Reading checkpoint files from outside: which states they hold, and their bytes while the rank writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from everstep.errors import CorruptCheckpoint
from everstep.slots.format import (
    CHUNK,
    EMPTY,
    I64,
    PAGE,
    PINS_AT,
    SAVED,
    SLOT,
    U64,
    Pin,
    SlotHeader,
    SlotInfo,
    file_header,
    inspect_slot,
    pins_of,
)
from everstep.system import private_files as private

READS = 3
"""Tries to read a slot that changes meanwhile."""


class SlotReader:
    """A live file as the agent sees it: read by ``pread``, so that a truncation is an error and no SIGBUS.

    The rank may write meanwhile: a reader of a payload has to compare the header
    before and after, and its checksum. Follows the file when it grows.

    Raises:
        FileNotFoundError: there is no file yet.
        CorruptCheckpoint: its header does not hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._slots = self._capacity = 0
        self._open()

    def headers(self) -> list[SlotHeader]:
        """The committed slots whose header holds, oldest step first."""
        self._follow()
        headers = [self._header(index) for index in range(self._slots)]
        return sorted((header for header in headers if header), key=lambda header: header.completed_steps)

    def header(self, completed_steps: int) -> SlotHeader | None:
        """The header of a step, or None if the file does not have the step (any more)."""
        return next((header for header in self.headers() if header.completed_steps == completed_steps), None)

    def read_into(self, header: SlotHeader, offset: int, buffer: memoryview) -> int:
        """Read payload bytes from ``offset``; returns how many, 0 when the slot holds another step now."""
        at = self._find(header, offset)
        room = min(len(buffer), header.payload_bytes - offset)
        return os.preadv(self._descriptor, [buffer[:room]], at) if at else 0

    def send(self, header: SlotHeader, offset: int, count: int, connection: int) -> int:
        """Like ``read_into``, but into a socket's descriptor, without a copy in this process."""
        at = self._find(header, offset)
        return os.sendfile(connection, self._descriptor, at, min(count, header.payload_bytes - offset)) if at else 0

    def intact(self, header: SlotHeader) -> bool:
        """Whether a slot still has the same state, with contents that match its checksum."""
        digest, done, buffer = xxhash.xxh3_64(seed=header.completed_steps), 0, memoryview(bytearray(CHUNK))
        while count := self.read_into(header, done, buffer):
            digest.update(buffer[:count])
            done += count
        return digest.intdigest() == header.checksum and self.header(header.completed_steps) == header

    def pin(self, why: Pin, completed_steps: int) -> bool:
        """Ask the rank to spare a step; whether the step is still held after that."""
        self._follow()
        os.pwrite(self._descriptor, I64.pack(completed_steps), PINS_AT + I64.size * why)
        return self.header(completed_steps) is not None

    def unpin(self, why: Pin) -> None:
        """Take a pin back."""
        self._follow()
        os.pwrite(self._descriptor, I64.pack(EMPTY), PINS_AT + I64.size * why)

    def pinned(self, why: Pin) -> int:
        """The step that is pinned; -1: none."""
        self._follow()
        return pins_of(os.pread(self._descriptor, PAGE, 0))[why]

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _open(self) -> None:
        descriptor = private.open_file(self.path, os.O_RDWR)
        slots, capacity, reason = file_header(os.pread(descriptor, PAGE, 0))
        if reason:
            os.close(descriptor)
            raise CorruptCheckpoint(f"{self.path}: {reason}")
        self.close()
        self._descriptor, self._slots, self._capacity = descriptor, slots, capacity

    def _follow(self) -> None:
        """Open the file anew, if it was replaced."""
        with contextlib.suppress(FileNotFoundError):
            now, mine = self.path.stat(), os.fstat(self._descriptor)
            if (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev):
                self._open()

    def _find(self, header: SlotHeader, offset: int) -> int:
        """Position in the file of a byte of a slot's payload; 0: the slot has another step now."""
        for index in range(self._slots):
            if self._header(index) == header:
                return PAGE + index * (PAGE + self._capacity) + PAGE + offset
        return 0

    def _header(self, index: int) -> SlotHeader | None:
        page = os.pread(self._descriptor, SLOT.size + 8, PAGE + index * (PAGE + self._capacity))
        if len(page) < SLOT.size + 8:
            return None
        steps, generation, phase, tensor_bytes, structure_bytes, checksum, saved_ns = SLOT.unpack_from(page)
        intact = U64.unpack_from(page, SLOT.size)[0] == xxhash.xxh3_64_intdigest(page[: SLOT.size])
        if steps < 0 or phase != SAVED or not intact:
            return None
        return SlotHeader(steps, generation, tensor_bytes, structure_bytes, checksum, saved_ns)


def held(path: Path, *, verify: bool = True) -> list[SlotInfo]:
    """The contents of a checkpoint file, one entry for each slot; damage gives reasons, never an exception.

    The file is read, not mapped, so that a truncation meanwhile cannot kill
    the reader with SIGBUS. A missing file gives an empty list.

    Args:
        path: The file.
        verify: Whether to read everything and compare checksums, and not only headers and lengths.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            slots, capacity, reason = file_header(file.read(PAGE))
            if reason:
                return [SlotInfo(EMPTY, 0, 0, False, reason)]
            starts = [PAGE + index * (PAGE + capacity) for index in range(slots)]
            return [_held_slot(file.fileno(), at, capacity, size, verify) for at in starts]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [SlotInfo(EMPTY, 0, 0, False, f"{path} cannot be read: {error}")]


def _held_slot(descriptor: int, at: int, capacity: int, size: int, verify: bool) -> SlotInfo:
    """A slot, read chunk by chunk, so that a checkpoint of many GB costs no memory."""

    def chunks(count: int) -> Iterator[memoryview]:
        buffer, done = memoryview(bytearray(min(count, CHUNK))), 0
        while done < count and (got := os.preadv(descriptor, [buffer[: count - done]], at + PAGE + done)):
            yield buffer[:got]
            done += got

    for _ in range(READS):
        page = os.pread(descriptor, PAGE, at)
        if len(page) < PAGE:
            return SlotInfo(EMPTY, 0, 0, False, f"the file ends at byte {size}, before this slot's header")
        slot = inspect_slot(page, min(capacity, max(0, size - at - PAGE)), chunks if verify else None)
        if slot.valid or os.pread(descriptor, PAGE, at) == page:
            break
        # A living rank saved into it meanwhile: what was read is no damage.
    return slot
