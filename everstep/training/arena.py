"""Private memory for the tensors of a slot that somebody keeps, filled while other things go on.

Fresh memory is what a restore costs most: the kernel clears every page of it.
So it is asked for in huge pages, and two threads fill it: the one that restores
and the one that verifies the slot meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable

from everstep.structure import TensorSpec

PIECE = 8 << 20
"""Bytes that a thread copies before it looks for more (ours)."""


class Arena:
    """A copy of parts of a slot, at the same offsets; what is not asked for costs no memory.

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
        self._pieces: deque[tuple[int, int]] = deque()
        self._verify = verify
        self._error: BaseException | None = None
        self._helper = threading.Thread(target=self._help, name="everstep restores", daemon=True)

    def place(self, spec: TensorSpec) -> memoryview:
        """Memory in which a tensor lies at its offset, once ``finish`` has returned. To be called before ``start``."""
        for at in range(spec.offset, spec.offset + spec.nbytes, PIECE):
            self._pieces.append((at, min(PIECE, spec.offset + spec.nbytes - at)))
        return self._memory

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
                at, size = self._pieces.popleft()
                ctypes.memmove(_address(self._memory, at), _address(self._source, at), size)


def _address(memory: memoryview, offset: int) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
