"""Copies batches of tensors from the host's memory into a slot.

For tensors larger than the cache, memmove is twice as fast as ``copy_``, since it writes past the cache; ctypes
releases the GIL for it. Small tensors, and tensors that are not contiguous, are copied in a single call of torch, which
takes the GIL only once.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from everstep.slots.tensor_table import TensorSpec
from everstep.training.state.layout import as_integers

LARGE = 1 << 16
"""The copying thread copies a tensor by memmove if it has at least this many bytes."""
PIECE = 32 << 20
"""A slot consists of pieces of this many bytes. No copy from a device reaches over the end of a piece: so other copies
wait for at most one piece, and each piece can be pinned separately (``pinned_memory.py``)."""


class Batch:
    """Tensors to copy to fixed offsets of any slot.

    The batch keeps the tensors alive, so that their memory is not reused meanwhile.

    Args:
        tensors: The tensors.
        specs: The entries of the tensors in the table, with their offsets.
        large: A contiguous tensor in the host's memory is copied by memmove if it has at least this many bytes.
    """

    def __init__(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec], *, large: int) -> None:
        self.moves: list[tuple[int, int, int]] = []
        """Offset in the slot, address and size of each range for memmove."""
        self._kept: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._offsets: list[int] = []
        self._views: dict[int, list[Tensor]] = {}
        for tensor, spec in zip(tensors, specs, strict=True):
            if not spec.nbytes:
                continue
            if tensor.is_cpu and tensor.is_contiguous() and spec.nbytes >= large:
                self._kept.append(tensor)
                self._move(spec.offset, tensor.data_ptr(), spec.nbytes)
                continue
            plain = tensor.detach()
            source = plain.reshape(-1).view(torch.uint8) if plain.is_contiguous() else as_integers(plain)
            for offset, part in _cut(source, spec.offset):
                self._offsets.append(offset)
                self._sources.append(part)

    def pairs(self, address: int) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors in the slot at an address, and the tensors to copy into them, without those of ``moves``.

        They are in the order of their addresses in the slot, and none of them reaches over the end of a piece.
        """
        if address not in self._views:
            self._views[address] = [
                at_address(address + offset, source)
                for offset, source in zip(self._offsets, self._sources, strict=True)
            ]
        return self._views[address], self._sources

    def parts(self) -> Iterator[tuple[int, int]]:
        """Offset in the slot and size of each range that is copied, bytes."""
        yield from ((offset, size) for offset, _, size in self.moves)
        yield from ((offset, source.nbytes) for offset, source in zip(self._offsets, self._sources, strict=True))

    def forget_slots(self) -> None:
        """Forget the addresses of slots, because the file has another mapping."""
        self._views.clear()

    def _move(self, offset: int, address: int, size: int) -> None:
        """Add a range for memmove. It is merged with the last range if it follows that range in slot and memory."""
        if self.moves:
            last, start, length = self.moves[-1]
            if (last + length, start + length) == (offset, address):
                self.moves[-1] = last, start, length + size
                return
        self.moves.append((offset, address, size))


class Copier:
    """Copies batches from the host's memory immediately, so the other methods have nothing to do.

    Copiers of other memory only queue the copies (``cuda_copier.DeviceCopier``).
    """

    def enter_thread(self) -> None:
        """Prepare a thread other than the script's for the copier; that thread calls this first."""

    def follow(self) -> None:
        """Make later copies wait for the work that this thread has queued on the device so far."""

    def copy(self, batch: Batch, address: int) -> None:
        """Copy into the slot whose tensors are at an address, or queue the copy; other threads run meanwhile."""
        for offset, start, size in batch.moves:
            ctypes.memmove(address + offset, start, size)
        targets, sources = batch.pairs(address)
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def can_pause(self) -> bool:
        """Whether ``pause`` is possible now; it is not while this thread captures a CUDA graph."""
        return True

    def pause(self) -> None:
        """Make work that this thread queues on the device later wait for the copies that are queued so far."""

    def mark(self) -> Any:
        """The time at which the copies that are queued from now on can begin, for ``wait``."""
        return time.perf_counter()

    def wait(self, mark: Any) -> float:
        """Return when the copies queued so far are done, with the seconds since a mark."""
        return time.perf_counter() - float(mark)

    def close(self) -> None:
        """Release all resources."""


def at_address(address: int, like: Tensor) -> Tensor:
    """Memory at an address as a tensor of the type and shape of ``like``."""
    raw = (ctypes.c_char * like.nbytes).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(like.dtype).view(like.shape)


def _cut(tensor: Tensor, offset: int) -> Iterator[tuple[int, Tensor]]:
    """Cut a tensor at the ends of the slot's pieces, in the order of its elements; yields the parts with their offsets.

    Args:
        tensor: The tensor, with any strides.
        offset: Its offset in the slot.
    """
    while tensor.nbytes > (room := PIECE - offset % PIECE):
        row = tensor.nbytes // len(tensor)
        count = max(room // row, 1)
        yield from _cut(tensor[0], offset) if row > room else [(offset, tensor[:count])]
        tensor, offset = tensor[count:], offset + count * row
    if tensor.nbytes:
        yield offset, tensor
