"""Copying tensors out of a slot into private memory, by two threads that share the work.

The slot's checksum is computed in order, and costs little where its input is in the cache already: so one thread copies
a piece and hashes it at once. The other thread makes pages present ahead of it, above all those of fresh memory, which
the kernel has to clear, and which is therefore requested in huge pages. Then it copies from the end backwards, until
both meet.
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
from everstep.training.layout import view_of

PIECE = 256 << 10
"""Bytes that are copied, and hashed at once: two of these fit into a core's own cache."""
WORTH = 64 << 10
"""Least bytes whose pages are made present ahead; page faults are as fast for less."""

Verify = Callable[[Iterable[int]], None]
"""Compares the checksum of the slot. It takes offsets up to which it may hash, one after the other, and hashes the rest
after the last one."""


class RestoreCopy:
    """Copies parts of a slot into private memory, at the same offsets; parts that are not asked for take no memory.

    Args:
        source: The tensors of the slot.
        verify: Raises when the slot is damaged.
    """

    def __init__(self, source: memoryview, verify: Verify) -> None:
        self._source = source
        # Private, so that a forked child's writes are its own.
        self._map = mmap.mmap(-1, max(len(source), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._map)
        self._pieces: deque[tuple[int, int, int]] = deque()
        """Offset in the slot, address and size."""
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
        """Copy a tensor to an address, before ``finish`` returns. To be called before ``start``.

        Raises:
            CorruptCheckpoint: it lies outside of the slot; the table is not verified yet.
        """
        if not 0 <= spec.offset <= spec.offset + spec.nbytes <= len(self._source):
            raise CorruptCheckpoint(
                f"the table says that {spec.name} has {spec.nbytes} bytes from {spec.offset} of {len(self._source)} on"
            )
        for at in range(0, spec.nbytes, PIECE):
            self._pieces.append((spec.offset + at, address + at, min(PIECE, spec.nbytes - at)))

    def start(self) -> None:
        """Begin to copy, in a thread."""
        self._pieces = deque(sorted(self._pieces))
        self._helper.start()

    def finish(self) -> None:
        """Return when all is copied and the slot is verified.

        Raises:
            CorruptCheckpoint: it is damaged.
        """
        try:
            self._verify(self._copied())
        finally:
            self._helper.join()
        if self._error is not None:
            raise self._error

    def _copied(self) -> Iterator[int]:
        """Copies from the beginning on; gives the ends of what is copied."""
        # When none is left the rest is hashed, while the other thread copies its last piece.
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
            with contextlib.suppress(IndexError):  # none is left
                while True:
                    offset, address, size = self._pieces.pop()
                    ctypes.memmove(address, self._address + offset, size)
        except BaseException as error:
            self._error = error


def _runs(pieces: Iterable[tuple[int, int, int]], memory: int) -> Iterator[tuple[int, int, bool]]:
    """Begin and end in the slot of pieces that lie together, and whether they go to the same offsets of ``memory``.

    Up to about a stride each, and at least ``WORTH`` bytes.
    """
    begin = end = 0
    fresh = False
    for offset, address, size in (*pieces, (-1, 0, 0)):
        ours = address - memory == offset
        if ours is not fresh or not 0 <= offset - end < mmap.PAGESIZE or end - begin >= STRIDE:
            if end - begin >= WORTH:
                yield begin, end, fresh
            begin, fresh = offset, ours
        end = offset + size


def _address(memory: memoryview, offset: int) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
