"""Tensors of a GPU into a slot, beside the GPU's other work.

Copies run on a stream of their own, behind the end of the step and before the
next ``optimizer.step``; the host only gives the orders. The memory of a slot is
registered with CUDA when the slot is used first: copies into memory that is not
pinned would be slow and would not run beside anything. Slot by slot, because
pinning takes a while for each GB, and a restart needs one slot to restore from
and one for its first save.

Tensors that forward may change are not copied aside on the device first: the
next forward waits for their copy. They are few and small (buffers), a second
copy would take memory of the device, which is what is short, and for many of
them it would not be faster than the bus.

Not run on a GPU yet.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from everstep.training.copier import Batch

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of the process."""


class PinnedMemory:
    """Pieces of a mapping that are registered with CUDA, each from its first use until the mapping goes."""

    def __init__(self) -> None:
        self._pieces: dict[int, tuple[int, bool]] = {}
        """Address → length, and whether CUDA took it."""

    def pin(self, address: int, length: int) -> None:
        """Register a piece unless it is; where that cannot be, its copies are slow, and a warning says so once.

        Args:
            address: Of allocated memory: CUDA makes all of its pages present.
            length: Bytes. A piece that has grown is registered anew.
        """
        before, pinned = self._pieces.get(address, (0, False))
        if length <= before:
            return
        if pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        code = int(torch.cuda.cudart().cudaHostRegister(address, length, PORTABLE))  # type: ignore[no-untyped-call]
        if code and all(known for _, known in self._pieces.values()):
            warnings.warn(
                f"everstep: CUDA cannot pin {length / 1e6:.0f} MB of the checkpoint file (error {code}): copies "
                "will be slow. Raise the limit of locked memory (ulimit -l) or use fewer slots",
                RuntimeWarning,
                stacklevel=2,
            )
        self._pieces[address] = length, not code

    def unpin(self) -> None:
        """Undo it all; to be called before the memory is unmapped."""
        for address, (_, pinned) in self._pieces.items():
            if pinned:
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pieces.clear()


class DeviceCopier:
    """Copies from one GPU.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Copy behind what the current stream has to do now: the rest of the step."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, batch: Batch, address: int) -> None:
        """Order the copies of a batch."""
        places, sources = batch.pairs(address)
        if sources:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                torch._foreach_copy_(places, sources, non_blocking=True)

    def hold(self) -> None:
        """Let the current stream wait; the host does not."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait(self) -> None:
        """Return when all is copied; sleeps instead of spinning."""
        done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._stream)
        done.synchronize()

    def close(self) -> None:
        """Wait for the copies."""
        self._stream.synchronize()
