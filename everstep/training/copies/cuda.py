"""Defines the interface of all calls that everstep makes to CUDA.

Callers have to respect three rules of CUDA:

* Each thread has a current device, which is at first device 0, even if its rank uses another one. A call with the wrong
  current device makes a context on another rank's GPU, which takes about 0.5 GB of its memory, and fails in
  exclusive-process mode.
* A failed call leaves an error behind, which the next kernel launch of the same thread raises.
* While any thread captures a CUDA graph, calls that pin memory or wait for an event break the capture, unless the
  capture mode of their thread is relaxed.

``TorchCuda`` makes the calls with torch. Tests without a GPU use a fake; the same contract test runs on both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor

PORTABLE = 1
"""cudaHostRegisterPortable: the memory is pinned for all devices of the process."""


RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: the thread's calls do not break captures of other threads."""


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Return when the stream has reached it; sleeps instead of spinning."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds of the device's clock from it until a later event of the stream, which was waited for."""


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

    def relax_capture(self) -> None:
        """From now on, calls of this thread do not break the capture of a CUDA graph by another thread.

        Raises:
            RuntimeError: CUDA refuses it.
        """

    def is_capturing(self) -> bool:
        """Whether the current stream of this thread captures a CUDA graph."""

    def new_stream(self) -> Stream:
        """A stream of the current device."""

    def current_stream(self) -> Stream:
        """The current stream of this thread on the current device."""

    def copy(self, targets: list[Tensor], sources: list[Tensor], stream: Any) -> None:
        """Queue copies on a stream of the current device.

        Raises:
            RuntimeError: CUDA refuses the copies, or an earlier call of this thread left an error behind.
        """

    def event(self, stream: Any) -> Event:
        """The point at which a stream of the current device has done the work queued so far."""

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

    def relax_capture(self) -> None:
        """Call the driver, since torch's own module of CUDA's runtime does not have this function."""
        if torch.version.hip:
            return  # it has another driver, and captures were not tried there
        mode = ctypes.c_int(RELAXED)
        code = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if code:
            raise RuntimeError(f"CUDA cannot relax the capture mode of a thread (error {code})")

    def is_capturing(self) -> bool:
        """Ask for the current stream."""
        return torch.cuda.is_current_stream_capturing()

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

    def event(self, stream: Any) -> Event:
        """An event for which a thread sleeps, with a time."""
        event: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return cast(Event, event)

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
