"""Tensors out of a slot, into memory of their own, by two threads, one of which verifies the slot first.

Fresh memory is what a restore costs most: the kernel clears every page of it.
So it is asked for in huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from everstep.errors import CorruptCheckpoint
from everstep.structure import TensorSpec
from everstep.training.layout import view_of

PIECE = 8 << 20
"""Bytes that a thread copies before it looks for more (ours)."""


class Arena:
    """Private memory that takes a copy of parts of a slot at the same offsets; what is not asked for costs none.

    Args:
        source: The tensors of the slot.
        verify: Raises when the slot is damaged; called in a thread.
    """

    def __init__(self, source: memoryview, verify: Callable[[], None]) -> None:
        self._source = source
        # Private, so that a forked child's writes are its own.
        self._map = mmap.mmap(-1, max(len(source), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._map)
        self._pieces: deque[tuple[int, int, int]] = deque()
        self._verify = verify
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
            source = _address(self._source, spec.offset + at)
            self._pieces.append((address + at, source, min(PIECE, spec.nbytes - at)))

    def start(self) -> None:
        """Begin to verify, and then to copy, in a thread."""
        self._helper.start()

    def finish(self) -> None:
        """Return when all is copied and the slot is verified.

        Raises:
            CorruptCheckpoint: it is damaged.
        """
        self._work()
        self._helper.join()
        if self._error is not None:
            raise self._error

    def _help(self) -> None:
        try:
            self._verify()
            self._work()
        except BaseException as error:
            self._error = error

    def _work(self) -> None:
        with contextlib.suppress(IndexError):  # none is left
            while True:
                ctypes.memmove(*self._pieces.popleft())


def _address(memory: memoryview, offset: int) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
