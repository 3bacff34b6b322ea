"""Tensors into a slot: what is to be copied, and how that is done for memory of the host.

memmove is twice as fast as ``copy_`` from about a cache's size on (it streams
past the cache), and ctypes releases the GIL for it. Small tensors and those
that are not contiguous go together in one call of torch, which takes the GIL
once for all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from everstep.slots.tensor_table import TensorSpec

LARGE = 1 << 16
"""Tensors of so many bytes or more are copied by a memmove of their own in the copying thread."""
PIECE = 32 << 20
"""Tensors of a device are copied in pieces of this size, so that other copies need not wait for a whole one."""


class Batch:
    """Tensors to be copied to fixed places of whichever slot is next.

    Keeps the tensors: their memory is not used for something else meanwhile.

    Args:
        tensors: What to copy.
        specs: Their places.
        large: Contiguous tensors of the host's memory from so many bytes on are moved one by one.
    """

    def __init__(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec], *, large: int) -> None:
        self.moves: list[tuple[int, int, int]] = []
        """Place, address and size of what memmove copies."""
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
        """Places in the slot's tensors at an address, as tensors, and what goes there, beside ``moves``."""
        if address not in self._views:
            self._views[address] = [
                _view(address + place, source) for place, source in zip(self._places, self._sources, strict=True)
            ]
        return self._views[address], self._sources

    def forget_slots(self) -> None:
        """The file was mapped anew: its slots are elsewhere now."""
        self._views.clear()

    def _add(self, place: int, source: Tensor) -> None:
        self._places.append(place)
        self._sources.append(source)

    def _move(self, place: int, address: int, size: int) -> None:
        """One more range, together with the one before when both continue it."""
        if self.moves:
            before, start, length = self.moves[-1]
            if (before + length, start + length) == (place, address):
                self.moves[-1] = before, start, length + size
                return
        self.moves.append((place, address, size))


class Copier(Protocol):
    """Copies batches of one kind of memory."""

    def enter_thread(self) -> None:
        """To be called first by a thread, other than the script's, that is going to use it."""

    def follow(self) -> None:
        """Copy what comes after the work that this thread has given to the device so far."""

    def copy(self, batch: Batch, address: int) -> None:
        """Copy into the slot whose tensors are at an address, or give the order for it."""

    def hold(self) -> None:
        """Let the work that this thread gives to the device from now on wait for the copies ordered so far."""

    def wait(self) -> None:
        """Return when the copies ordered so far are done."""

    def close(self) -> None:
        """Give everything back."""


class HostCopier:
    """Copies from the host's memory, at once: there is nothing to hold or to wait for."""

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

    def hold(self) -> None:
        """Nothing to do."""

    def wait(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def _view(address: int, like: Tensor) -> Tensor:
    """Memory of the slot as a tensor of the same type and shape as another."""
    raw = (ctypes.c_char * (like.numel() * like.element_size())).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(like.dtype).view(like.shape)
