"""Defines the interface of all calls that everstep makes to CUDA.

Callers have to respect two rules of CUDA. First, each thread has a current device, which is at first device 0, even if
its rank uses another one. A call with the wrong current device makes a context on another rank's GPU, which takes about
0.5 GB of its memory, and fails in exclusive-process mode. Second, a failed call leaves an error behind, which the next
kernel launch of the same thread raises.

``TorchCuda`` makes the calls with torch. Tests without a GPU use a fake; the same contract test runs on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor

PORTABLE = 1
"""cudaHostRegisterPortable: the memory is pinned for all devices of the process."""


class Stream(Protocol):
    """A stream of a device."""

    def wait_stream(self, stream: Any, /) -> None:
        """Make later work wait for the work that is queued on another stream so far."""

    def synchronize(self) -> None:
        """Return when all queued work is done."""


class Cuda(Protocol):
    """The calls to CUDA. A call without a device uses the current device of the calling thread."""

    def set_device(self, device: torch.device) -> None:
        """Make a device this thread's current device."""

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which a device is this thread's current device."""

    def new_stream(self) -> Stream:
        """A stream of the current device."""

    def current_stream(self) -> Stream:
        """The current stream of this thread on the current device."""

    def copy(self, targets: list[Tensor], sources: list[Tensor], stream: Any) -> None:
        """Queue copies on a stream of the current device.

        Raises:
            RuntimeError: CUDA refuses the copies, or an earlier call of this thread left an error behind.
        """

    def wait(self, stream: Any) -> None:
        """Return when a stream of the current device has done the work queued so far; sleeps instead of spinning."""

    def mark(self, stream: Any) -> Any:
        """A mark of the time at which a stream of the current device has done the work queued so far."""

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Seconds between two marks of one stream; waits for the second."""

    def in_use(self) -> list[int]:
        """Indexes of the devices that this process uses; empty: it does not use CUDA."""

    def current_device(self) -> int:
        """Index of the calling thread's current device."""

    def random_state(self, device: int) -> Tensor:
        """State of a device's default generator, in the host's memory."""

    def set_random_state(self, device: int, state: Tensor) -> None:
        """Set a device's default generator."""

    def register(self, address: int, length: int) -> int:
        """Pin memory of the host for all devices.

        Returns:
            CUDA's error code; 0: success. Any other code also stays behind as this thread's error.
        """

    def unregister(self, address: int) -> int:
        """Undo ``register``; returns CUDA's error code in the same way."""


class TorchCuda:
    """The calls to CUDA, made with torch."""

    def set_device(self, device: torch.device) -> None:
        """Make a device this thread's current device."""
        torch.cuda.set_device(device)

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which a device is this thread's current device; it makes no CUDA context on the former one."""
        return cast(AbstractContextManager[Any], torch.cuda.device(device))

    def new_stream(self) -> Stream:
        """A stream of the current device."""
        return cast(Stream, torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """The current device's current stream."""
        return torch.cuda.current_stream()

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Any) -> None:
        """Queue copies."""
        with torch.no_grad(), torch.cuda.stream(stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def wait(self, stream: Any) -> None:
        """Wait for an event, without spinning."""
        done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)
        done.synchronize()

    def mark(self, stream: Any) -> Any:
        """A recorded event."""
        mark: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        mark.record(stream)
        return mark

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Seconds between two events."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

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
