"""Copies tensors from a slot into private memory, with two threads.

The first thread copies pieces in order, and hashes each of them directly after its copy, while it is in the cache. The
second thread makes pages present ahead of the first one. Most of this work is for pages of new memory, which the kernel
has to clear, so huge pages are used there. After that the second thread copies pieces from the end backwards, until
both threads meet.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from everstep.errors import CorruptCheckpoint
from everstep.slots.tensor_table import TensorSpec
from everstep.system.pages import READ, STRIDE, WRITE, populate
from everstep.training.state.layout import view_of

PIECE = 256 << 10
"""Bytes of a piece; two pieces fit into a core's own cache."""
LEAST_RUN = 64 << 10
"""Pages of at least this many bytes are made present before they are copied. For fewer bytes, page faults are as
fast."""

Verify = Callable[[Iterable[int]], None]
"""Compares the checksum of the slot. It requests offsets from the iterable, hashes up to each of them, and hashes the
rest after the last one (``SlotFile.verify``)."""


class RestoreCopy:
    """Copies tensors of a slot into private memory at the same offsets. Ranges that are not copied use no memory.

    Args:
        source: The tensors of the slot.
        verify: Compares the checksum of the slot, and raises an error if it is damaged.
    """

    def __init__(self, source: memoryview, verify: Verify) -> None:
        self._source = source
        # The memory is private, so that writes of a forked child do not change it.
        self._map = mmap.mmap(-1, max(len(source), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._map)
        self._pieces: deque[tuple[int, int, int]] = deque()
        """Offset in the slot, address and size of each piece."""
        self._verify = verify
        self._address = _address(source, 0) if len(source) else 0
        self._error: BaseException | None = None
        self._helper = threading.Thread(target=self._help, name="everstep restores", daemon=True)

    def tensor(self, spec: TensorSpec) -> Tensor:
        """A tensor in the private memory, which has its contents once ``finish`` has returned."""
        if spec.nbytes:
            self.fill(spec, _address(self._memory, spec.offset))
        return view_of(self._memory, spec)

    def fill(self, spec: TensorSpec, address: int) -> None:
        """Request the copy of a tensor to an address. It is called before ``start``; ``finish`` completes the copy.

        Raises:
            CorruptCheckpoint: according to the table, which is not verified yet, the tensor lies outside the slot.
        """
        if not 0 <= spec.offset <= spec.offset + spec.nbytes <= len(self._source):
            raise CorruptCheckpoint(
                f"according to the table, {spec.name} has {spec.nbytes} bytes from byte {spec.offset}, "
                f"but the slot has only {len(self._source)} bytes of tensors"
            )
        for at in range(0, spec.nbytes, PIECE):
            self._pieces.append((spec.offset + at, address + at, min(PIECE, spec.nbytes - at)))

    def start(self) -> None:
        """Start the second thread."""
        self._pieces = deque(sorted(self._pieces))
        self._helper.start()

    def finish(self) -> None:
        """Return when all tensors are copied and the slot is verified.

        Raises:
            CorruptCheckpoint: the slot is damaged.
        """
        try:
            self._verify(self._copied())
        finally:
            self._helper.join()
        if self._error is not None:
            raise self._error

    def _copied(self) -> Iterator[int]:
        """Copy pieces from the beginning on; yields the end of each piece."""
        # When no piece is left, the caller hashes the rest while the second thread copies its last piece.
        with contextlib.suppress(IndexError):
            while True:
                offset, address, size = self._pieces.popleft()
                ctypes.memmove(address, self._address + offset, size)
                yield offset + size

    def _help(self) -> None:
        try:
            for begin, end, fresh in _runs(tuple(self._pieces), _address(self._memory, 0)):
                populate(self._address + begin, end - begin, READ)
                if fresh:
                    populate(_address(self._memory, begin), end - begin, WRITE)
            with contextlib.suppress(IndexError):  # no piece is left
                while True:
                    offset, address, size = self._pieces.pop()
                    ctypes.memmove(address, self._address + offset, size)
        except BaseException as error:
            self._error = error


def _runs(pieces: Iterable[tuple[int, int, int]], memory: int) -> Iterator[tuple[int, int, bool]]:
    """Runs of adjacent pieces: beginning and end in the slot, and whether they go to the same offsets of ``memory``.

    A run has at least ``LEAST_RUN`` and at most about ``STRIDE`` bytes.
    """
    begin = end = 0
    fresh = False
    for offset, address, size in (*pieces, (-1, 0, 0)):
        ours = address - memory == offset
        if ours is not fresh or not 0 <= offset - end < mmap.PAGESIZE or end - begin >= STRIDE:
            if end - begin >= LEAST_RUN:
                yield begin, end, fresh
            begin, fresh = offset, ours
        end = offset + size


def _address(memory: memoryview, offset: int) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
