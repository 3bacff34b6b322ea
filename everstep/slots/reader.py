"""Reads checkpoint files from another process, while their rank may write to them."""

from __future__ import annotations

import contextlib
import mmap
import os
from functools import partial
from pathlib import Path

from everstep.errors import CorruptCheckpoint
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.format import (
    EMPTY,
    I64,
    PAGE,
    PINS_AT,
    SLOT_BYTES,
    FileHeader,
    Pin,
    SlotHeader,
    SlotInfo,
    StoredSlot,
    file_header,
    inspect_slot,
    slot_at,
)
from everstep.slots.owner import SlotOwner
from everstep.system import private_files as private
from everstep.system.shared_words import SharedWords

READS = 3
"""Number of tries to read a slot that changes meanwhile."""


class SlotReader:
    """The agent's access to a checkpoint file. It reads with ``pread``, so that a truncation is not a SIGBUS.

    The rank may write to the file meanwhile. So the reader of a payload has to compare the slot's header before and
    after, or the checksum of the payload. When the file is replaced, the new file is opened. Only the first page is
    mapped, so that a pin is one store.

    Args:
        path: The file.
        owner: The rank whose states the file must have; None: any rank, for tools.

    Raises:
        FileNotFoundError: there is no file yet.
        CorruptCheckpoint: the file's header is damaged, or the file has another owner.
    """

    def __init__(self, path: Path, owner: SlotOwner | None = None) -> None:
        self.path = path
        self._expected = owner
        self._descriptor = -1
        self._page: mmap.mmap | None = None
        self._words: SharedWords | None = None
        self._header: FileHeader
        self._open()

    @property
    def owner(self) -> SlotOwner:
        """The rank whose states the file has."""
        return self._header.owner

    def headers(self) -> list[SlotHeader]:
        """The headers of the committed slots, oldest step first; damaged headers are left out."""
        self._follow()
        headers = [self._stored(index).header() for index in range(self._header.slots)]
        return sorted((header for header in headers if header), key=lambda header: header.completed_steps)

    def newest_slots(self) -> int:
        """Number of slots that have the newest steps, or are being written, whatever is pinned.

        A save never overwrites a pinned step while another slot is left, so each pinned step takes a slot. But three
        slots have no pinned step (``by_need``).

        Raises:
            CorruptCheckpoint: the file was truncated.
        """
        slots, pins = self._header.slots, {self.pinned(why) for why in Pin}
        pinned = sum(header.completed_steps in pins for header in self.headers())
        return max(slots - pinned, min(slots, 3))

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

    def intact(self, header: SlotHeader, threads: int = 1) -> bool:
        """Whether a slot still has the state of a header, and contents that match its checksum.

        Args:
            header: The header of the slot.
            threads: Number of threads that read and hash (``hashing_threads``).
        """
        checksum = PayloadChecksum.of(partial(self.read_into, header), header.payload_bytes, threads)
        value = checksum.value(self.owner, header.completed_steps)
        return value == header.checksum and self.header(header.completed_steps) == header

    def pin(self, why: Pin, completed_steps: int) -> bool:
        """Pin a step, so that the rank does not overwrite it; returns whether the file still has the step.

        Raises:
            CorruptCheckpoint: the file was truncated.
        """
        self._pins().set(PINS_AT + I64.size * why, completed_steps)
        return self.header(completed_steps) is not None

    def unpin(self, why: Pin) -> None:
        """Remove a pin."""
        self._pins().set(PINS_AT + I64.size * why, EMPTY)

    def pinned(self, why: Pin) -> int:
        """The step that is pinned; -1: none."""
        return self._pins().get(PINS_AT + I64.size * why)

    def close(self) -> None:
        """Close the file."""
        if self._words is not None and self._page is not None:
            self._words.release()
            self._page.close()
            os.close(self._descriptor)
        self._words, self._page, self._descriptor = None, None, -1

    def _open(self) -> None:
        descriptor = private.open_file(self.path, os.O_RDWR)
        header = file_header(os.pread(descriptor, PAGE, 0), self._expected)
        if header.problem:
            os.close(descriptor)
            raise CorruptCheckpoint(f"{self.path}: {header.problem}")
        self.close()
        self._descriptor, self._header = descriptor, header
        self._page = mmap.mmap(descriptor, PAGE)
        self._words = SharedWords(self._page)

    def _follow(self) -> None:
        """Open the file again, if it was replaced."""
        with contextlib.suppress(FileNotFoundError):
            now, mine = self.path.stat(), os.fstat(self._descriptor)
            if (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev):
                self._open()

    def _pins(self) -> SharedWords:
        self._follow()
        assert self._words is not None
        if os.fstat(self._descriptor).st_size < PAGE:  # access to the mapping would be a SIGBUS
            raise CorruptCheckpoint(f"{self.path} was truncated")
        return self._words

    def _find(self, header: SlotHeader, offset: int) -> int:
        """Position in the file of a byte of a slot's payload; 0: the slot was overwritten."""
        for index in range(self._header.slots):
            slot = self._stored(index)
            if slot.header() == header:
                return slot.at + offset
        return 0

    def _stored(self, index: int) -> StoredSlot:
        page = os.pread(self._descriptor, SLOT_BYTES, slot_at(index))
        return StoredSlot.unpack(page) if len(page) == SLOT_BYTES else StoredSlot()


def held(path: Path, *, owner: SlotOwner | None = None, verify: bool = True) -> list[SlotInfo]:
    """The slots of a checkpoint file. A damaged slot is listed with its reason; it raises no error.

    A missing file has no slots.

    Args:
        path: The file.
        owner: The rank whose states the file must have; None: any rank, for tools.
        verify: True: read all data and compare checksums. False: check only headers and lengths.
    """
    try:
        with path.open("rb", buffering=0) as file:
            header = file_header(file.read(PAGE), owner)
            if header.problem:
                return [SlotInfo(EMPTY, 0, 0, False, header.problem)]
            return [_held_slot(file.fileno(), index, header.owner, verify) for index in range(header.slots)]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [SlotInfo(EMPTY, 0, 0, False, f"{path} cannot be read: {error}")]


def _held_slot(descriptor: int, index: int, owner: SlotOwner, verify: bool) -> SlotInfo:
    """Check one slot."""

    def read(offset: int, buffer: memoryview) -> int:
        return os.preadv(descriptor, [buffer], slot.at + offset)

    def checksum() -> int:
        return PayloadChecksum.of(read, slot.payload_bytes).value(owner, slot.completed_steps)

    for _ in range(READS):
        page = os.pread(descriptor, SLOT_BYTES, slot_at(index))
        size = os.fstat(descriptor).st_size
        if len(page) < SLOT_BYTES:
            return SlotInfo(EMPTY, 0, 0, False, f"the file ends at byte {size}, before this slot's header")
        slot = StoredSlot.unpack(page)
        info = inspect_slot(slot, min(slot.room, size - slot.at), checksum if verify else None)
        if info.valid or os.pread(descriptor, SLOT_BYTES, slot_at(index)) == page:
            break
        # The rank saved into the slot meanwhile, so a wrong checksum does not mean damage.
    return info
