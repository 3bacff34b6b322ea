"""Reads checkpoint files from another process, while their rank may write to them."""

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
"""Number of tries to read a slot that changes meanwhile."""


class SlotReader:
    """The agent's access to a checkpoint file. It reads with ``pread``, so that a truncation is not a SIGBUS.

    The rank may write to the file meanwhile. So the reader of a payload has to compare the slot's header before and
    after, or the checksum of the payload. When the file is replaced by a larger one, the new file is opened.

    Raises:
        FileNotFoundError: there is no file yet.
        CorruptCheckpoint: the file's header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._slots = self._capacity = 0
        self._open()

    def headers(self) -> list[SlotHeader]:
        """The headers of the committed slots, oldest step first; damaged headers are left out."""
        self._follow()
        headers = [self._header(index) for index in range(self._slots)]
        return sorted((header for header in headers if header), key=lambda header: header.completed_steps)

    def header(self, completed_steps: int) -> SlotHeader | None:
        """The header of a step; None: the file does not have the step, or no longer has it."""
        return next((header for header in self.headers() if header.completed_steps == completed_steps), None)

    def read_into(self, header: SlotHeader, offset: int, buffer: memoryview) -> int:
        """Read payload bytes from ``offset`` on; returns their number. 0: the slot was overwritten, or ``offset`` is
        at the end."""
        at = self._find(header, offset)
        room = min(len(buffer), header.payload_bytes - offset)
        return os.preadv(self._descriptor, [buffer[:room]], at) if at else 0

    def send(self, header: SlotHeader, offset: int, count: int, connection: int) -> int:
        """``read_into`` for the descriptor of a socket; this process copies nothing."""
        at = self._find(header, offset)
        return os.sendfile(connection, self._descriptor, at, min(count, header.payload_bytes - offset)) if at else 0

    def intact(self, header: SlotHeader) -> bool:
        """Whether a slot still has the state of a header, and contents that match its checksum."""
        digest, done, buffer = xxhash.xxh3_64(seed=header.completed_steps), 0, memoryview(bytearray(CHUNK))
        while count := self.read_into(header, done, buffer):
            digest.update(buffer[:count])
            done += count
        return digest.intdigest() == header.checksum and self.header(header.completed_steps) == header

    def pin(self, why: Pin, completed_steps: int) -> bool:
        """Pin a step, so that the rank does not overwrite it; returns whether the file still has the step."""
        self._follow()
        os.pwrite(self._descriptor, I64.pack(completed_steps), PINS_AT + I64.size * why)
        return self.header(completed_steps) is not None

    def unpin(self, why: Pin) -> None:
        """Remove a pin."""
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
        """Open the file again, if it was replaced."""
        with contextlib.suppress(FileNotFoundError):
            now, mine = self.path.stat(), os.fstat(self._descriptor)
            if (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev):
                self._open()

    def _find(self, header: SlotHeader, offset: int) -> int:
        """Position in the file of a byte of a slot's payload; 0: the slot was overwritten."""
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
    """The slots of a checkpoint file. A damaged slot is listed with its reason; it raises no error.

    A missing file has no slots.

    Args:
        path: The file.
        verify: True: read all data and compare checksums. False: check only headers and lengths.
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
    """Check one slot, chunk by chunk, so that a checkpoint of many GB needs little memory."""

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
        # The rank saved into the slot meanwhile, so a wrong checksum does not mean damage.
    return slot
