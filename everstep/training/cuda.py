"""The calls of CUDA that everstep makes, behind one interface.

Two rules of CUDA decide how they must be made. Each thread has a current
device, and begins with device 0, whichever one its rank uses: a call there
makes a context on the device of another rank (about 0.5 GB of its memory, an
error in exclusive-process mode). And a call that fails leaves an error behind,
which the next kernel launch of the same thread raises.

``TorchCuda`` is the real one; ``RecordingCuda`` of ``recording_cuda.py`` stands
for it where there is no GPU. Both run the same contract test.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of the process."""


class Stream(Protocol):
    """A stream of one device."""

    def wait_stream(self, stream: Any, /) -> None:
        """Do what comes from now on after what another stream has to do so far."""

    def synchronize(self) -> None:
        """Return when all is done."""


class Cuda(Protocol):
    """What everstep asks of CUDA; where no device is named, of the calling thread's current one."""

    def set_device(self, device: torch.device) -> None:
        """Make a device this thread's current one."""

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """A device as this thread's current one, for a while."""

    def new_stream(self) -> Stream:
        """A stream of the current device."""

    def current_stream(self) -> Stream:
        """The stream to which this thread gives the current device's work."""

    def copy(self, places: list[Tensor], sources: list[Tensor], stream: Any) -> None:
        """Order copies on a stream of the current device.

        Raises:
            RuntimeError: CUDA refuses, or a call of this thread before left an error behind.
        """

    def wait(self, stream: Any) -> None:
        """Return when a stream of the current device has done what it has to do so far; sleeps instead of spinning."""

    def in_use(self) -> list[int]:
        """Indexes of the devices that this process has done anything on; empty: CUDA is not in use."""

    def current_device(self) -> int:
        """Index of the calling thread's current device."""

    def random_state(self, device: int) -> Tensor:
        """State of a device's default generator, in the host's memory."""

    def set_random_state(self, device: int, state: Tensor) -> None:
        """Set a device's default generator."""

    def register(self, address: int, length: int) -> int:
        """Pin memory of the host for all devices.

        Returns:
            CUDA's error code; 0: done. Any other one is left behind for this thread.
        """

    def unregister(self, address: int) -> int:
        """Undo ``register``; returns what it does."""


class TorchCuda:
    """CUDA as torch has it."""

    def set_device(self, device: torch.device) -> None:
        """Make a device this thread's current one."""
        torch.cuda.set_device(device)

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """A device as this thread's current one; makes no context on the one before."""
        return cast(AbstractContextManager[Any], torch.cuda.device(device))

    def new_stream(self) -> Stream:
        """A stream of the current device."""
        return cast(Stream, torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """The current device's current stream."""
        return torch.cuda.current_stream()

    def copy(self, places: Sequence[Tensor], sources: Sequence[Tensor], stream: Any) -> None:
        """Order copies."""
        with torch.no_grad(), torch.cuda.stream(stream):
            torch._foreach_copy_(list(places), list(sources), non_blocking=True)

    def wait(self, stream: Any) -> None:
        """Wait for an event, without spinning."""
        done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)
        done.synchronize()

    def in_use(self) -> list[int]:
        """Devices with a primary context."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return []
        return [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]

    def current_device(self) -> int:
        """Of this thread."""
        return torch.cuda.current_device()

    def random_state(self, device: int) -> Tensor:
        """Of torch's default generator."""
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: int, state: Tensor) -> None:
        """Of torch's default generator."""
        torch.cuda.set_rng_state(state, device)

    def register(self, address: int, length: int) -> int:
        """``cudaHostRegister``."""
        return int(torch.cuda.cudart().cudaHostRegister(address, length, PORTABLE))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> int:
        """``cudaHostUnregister``."""
        return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
