"""Copies tensors of a GPU into memory that is not pinned, by way of a small pinned buffer.

The buffer has two halves: while the processor moves the contents of one half into the slot, the GPU fills the other
one. The caller waits for the GPU only if both halves are in use. CUDA would copy into such memory in the same way, but
in the thread that asks for the copy, which waits for all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from everstep.training.copies import copier
from everstep.training.copies.copier import at_address
from everstep.training.copies.cuda import Cuda, Event
from everstep.training.copies.pinned_memory import PinnedMemory


class Staging:
    """A pinned buffer of two pieces.

    Args:
        cuda: The calls to CUDA.
        pinned: The pinned memory of the process.
    """

    def __init__(self, cuda: Cuda, pinned: PinnedMemory) -> None:
        self._cuda = cuda
        self._memory = mmap.mmap(-1, 2 * copier.PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.usable = pinned.pin_buffer(self._memory)
        """Whether the buffer is pinned."""
        self._half = 0
        self._filled: deque[tuple[Event, int, list[Tensor]]] = deque()
        """For each half in use, the oldest first: when it is filled, its address, and the places of its tensors."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Any) -> None:
        """Queue copies of tensors on a stream. They arrive in the slot when the half is needed again, or in ``empty``.

        Args:
            targets: Tensors in a slot, as ``Batch.pairs`` gives them.
            sources: The tensors to copy into them, on the current device.
            stream: The stream.
        """
        begin = 0
        while begin < len(targets):
            first = targets[begin].data_ptr()
            end = begin
            while end < len(targets) and targets[end].data_ptr() + targets[end].nbytes - first <= copier.PIECE:
                end += 1
            if len(self._filled) == 2:
                self._empty_oldest()
            half, self._half = self._address + self._half * copier.PIECE, 1 - self._half
            places = list(targets[begin:end])
            buffers = [at_address(half + place.data_ptr() - first, place) for place in places]
            self._cuda.copy(buffers, list(sources[begin:end]), stream)
            self._filled.append((self._cuda.event(stream), half, places))
            begin = end

    def empty(self) -> None:
        """Return when all tensors have arrived in their slot."""
        while self._filled:
            self._empty_oldest()

    def forget(self) -> None:
        """Forget tensors that have not arrived, since their save was given up and their slot may not exist."""
        self._filled.clear()

    def _empty_oldest(self) -> None:
        filled, half, places = self._filled.popleft()
        filled.synchronize()
        first = places[0].data_ptr()
        for begin, end in _runs(places):
            ctypes.memmove(begin, half + begin - first, end - begin)


def _runs(places: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Addresses of the beginnings and ends of tensors; those that follow each other without a gap are one run."""
    runs: list[tuple[int, int]] = []
    for place in places:
        begin, end = place.data_ptr(), place.data_ptr() + place.nbytes
        if runs and runs[-1][1] == begin:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return runs
