"""Copying tensors into a slot: batches of tensors, and the copier for memory of the host.

memmove is twice as fast as ``copy_`` from about a cache's size on (it streams past the cache), and ctypes releases the
GIL for it. Small tensors and those that are not contiguous go together in one call of torch, which takes the GIL once
for all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from everstep.slots.tensor_table import TensorSpec

LARGE = 1 << 16
"""Least bytes of a tensor that the copying thread copies by a memmove of its own."""
PIECE = 32 << 20
"""Tensors of a device are copied in pieces of this many bytes, so that other copies wait for a piece at most."""


class Batch:
    """Tensors to copy to fixed offsets of a slot, whichever it is.

    The batch keeps the tensors alive, so that their memory is not reused meanwhile.

    Args:
        tensors: The tensors.
        specs: Their offsets.
        large: Least bytes of a contiguous tensor of the host's memory that is moved by itself.
    """

    def __init__(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec], *, large: int) -> None:
        self.moves: list[tuple[int, int, int]] = []
        """Offset in the slot, address and size of each range for memmove."""
        self._kept: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._places: list[int] = []
        self._views: dict[int, list[Tensor]] = {}
        for tensor, spec in zip(tensors, specs, strict=True):
            if not spec.nbytes:
                continue
            if tensor.is_cpu and tensor.is_contiguous() and spec.nbytes >= large:
                self._kept.append(tensor)
                self._move(spec.offset, tensor.data_ptr(), spec.nbytes)
            elif tensor.is_contiguous():
                offset = spec.offset
                for piece in tensor.detach().reshape(-1).view(torch.uint8).split(PIECE):  # type: ignore[no-untyped-call]
                    self._add(offset, piece)
                    offset += piece.numel()
            else:
                self._add(spec.offset, tensor.detach())

    def pairs(self, address: int) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors in the slot at an address, and the tensors to copy into them; ``moves`` are not among them."""
        if address not in self._views:
            self._views[address] = [
                _view(address + place, source) for place, source in zip(self._places, self._sources, strict=True)
            ]
        return self._views[address], self._sources

    def forget_slots(self) -> None:
        """Forget the addresses of slots, after the file was mapped anew."""
        self._views.clear()

    def _add(self, place: int, source: Tensor) -> None:
        self._places.append(place)
        self._sources.append(source)

    def _move(self, place: int, address: int, size: int) -> None:
        """Add a range; it is merged with the last range if both continue it."""
        if self.moves:
            before, start, length = self.moves[-1]
            if (before + length, start + length) == (place, address):
                self.moves[-1] = before, start, length + size
                return
        self.moves.append((place, address, size))


class Copier(Protocol):
    """Copies batches from one kind of memory."""

    def enter_thread(self) -> None:
        """Prepare a thread other than the script's, which calls this before it uses the copier."""

    def follow(self) -> None:
        """Make later copies wait for the work that this thread has queued on the device so far."""

    def copy(self, batch: Batch, address: int) -> None:
        """Copy into the slot whose tensors are at an address, or order the copy."""

    def pause(self) -> None:
        """Pause work that this thread gives to the device from now on until the copies ordered so far are done."""

    def wait(self) -> None:
        """Return when the copies ordered so far are done."""

    def close(self) -> None:
        """Release all resources."""


class HostCopier:
    """Copies from the host's memory at once, so there is nothing to pause or to wait for."""

    def enter_thread(self) -> None:
        """Nothing to do."""

    def follow(self) -> None:
        """Nothing to do."""

    def copy(self, batch: Batch, address: int) -> None:
        """Copy; other threads run meanwhile."""
        for place, start, size in batch.moves:
            ctypes.memmove(address + place, start, size)
        places, sources = batch.pairs(address)
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(places, sources)

    def pause(self) -> None:
        """Nothing to do."""

    def wait(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def _view(address: int, like: Tensor) -> Tensor:
    """Memory of the slot as a tensor of the same type and shape as another."""
    raw = (ctypes.c_char * (like.numel() * like.element_size())).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(like.dtype).view(like.shape)
