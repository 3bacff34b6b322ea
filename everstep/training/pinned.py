"""Tensors of a GPU into a slot, beside the GPU's other work.

Copies run on a stream of their own, behind the end of the step and before the
next ``optimizer.step``; the host only gives the orders. The file's mapping is
registered with CUDA once: copies into memory that is not pinned would be slow
and would not run beside anything.

Tensors that forward may change are not copied aside on the device first: the
next forward waits for their copy. They are few and small (buffers), a second
copy would take memory of the device, which is what is short, and for many of
them it would not be faster than the bus.

Not run on a GPU yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from everstep.training.copier import Batch

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of the process."""


class PinnedRegion:
    """A mapping that is registered with CUDA.

    Args:
        region: Gives address and length of what is mapped now.
    """

    def __init__(self, region: Callable[[], tuple[int, int]]) -> None:
        self._region = region
        self._mapped = 0
        self._pinned = False

    def pin(self) -> None:
        """Register what is mapped now, unless it is; if that cannot be, copies are slow, and a warning says so once."""
        address, length = self._region()
        if address == self._mapped or not address:
            return
        self.unpin()
        code = int(torch.cuda.cudart().cudaHostRegister(address, length, PORTABLE))  # type: ignore[no-untyped-call]
        if code:
            warnings.warn(
                f"everstep: CUDA cannot pin the {length / 1e6:.0f} MB of the checkpoint file (error {code}): copies "
                "will be slow. Raise the limit of locked memory (ulimit -l) or use fewer slots",
                RuntimeWarning,
                stacklevel=2,
            )
        self._mapped, self._pinned = address, not code

    def unpin(self) -> None:
        """Undo it; to be called before the memory is unmapped."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._mapped)  # type: ignore[no-untyped-call]
        self._mapped, self._pinned = 0, False


class DeviceCopier:
    """Copies from one GPU.

    Args:
        device: Which.
        region: The mapping to copy into.
    """

    def __init__(self, device: torch.device, region: PinnedRegion) -> None:
        self._region = region
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        region.pin()

    def follow(self) -> None:
        """Copy behind what the current stream has to do now: the rest of the step."""
        self._region.pin()
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
