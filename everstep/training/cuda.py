"""The calls of CUDA that everstep makes, behind one interface.

Two rules of CUDA decide how they must be made. Each thread has a current device, and begins with device 0, whichever
one its rank uses: a call there makes a context on the device of another rank (about 0.5 GB of its memory, an error in
exclusive-process mode). And a call that fails leaves an error behind, which the next kernel launch of the same thread
raises.

``TorchCuda`` makes them with torch. Tests use a fake without a GPU, and run the same contract test on both.
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
    """A stream of a device."""

    def wait_stream(self, stream: Any, /) -> None:
        """Make later work wait for the work that another stream has so far."""

    def synchronize(self) -> None:
        """Return when all is done."""


class Cuda(Protocol):
    """The calls of CUDA; without a device in a call, they concern the calling thread's current device."""

    def set_device(self, device: torch.device) -> None:
        """Make a device this thread's current device."""

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which a device is this thread's current device."""

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
            CUDA's error code; 0: done. Any other code stays behind as this thread's error.
        """

    def unregister(self, address: int) -> int:
        """Undo ``register``; returns an error code likewise."""


class TorchCuda:
    """CUDA as torch has it."""

    def set_device(self, device: torch.device) -> None:
        """Make a device this thread's current device."""
        torch.cuda.set_device(device)

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which a device is this thread's current device; no CUDA context is made on the device before."""
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
        """Index of this thread's current device."""
        return torch.cuda.current_device()

    def random_state(self, device: int) -> Tensor:
        """State of torch's default generator of a device."""
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: int, state: Tensor) -> None:
        """Set torch's default generator of a device."""
        torch.cuda.set_rng_state(state, device)

    def register(self, address: int, length: int) -> int:
        """``cudaHostRegister``."""
        return int(torch.cuda.cudart().cudaHostRegister(address, length, PORTABLE))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> int:
        """``cudaHostUnregister``."""
        return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
