"""A fake of CUDA that records its calls, for machines without a GPU.

It follows rules of CUDA that are easily broken. Each thread has a current device, which is device 0 at first. Any
action on a device creates a context there. If a call leaves an error behind, the next kernel launch of the same thread
raises it. Copies happen at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ALREADY_REGISTERED = 712
"""The value of cudaErrorHostMemoryAlreadyRegistered."""
DEVICES = 2
NOT_REGISTERED = 713
"""The value of cudaErrorHostMemoryNotRegistered."""


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call."""

    what: str
    device: int
    """The current device of the thread."""
    thread: str
    """The name of the thread."""


class RecordingStream:
    """A stream that never has work, since the fake does all work at once."""

    def __init__(self, cuda: RecordingCuda, name: str, device: int) -> None:
        self.name, self.device = name, device
        self._cuda = cuda

    def wait_stream(self, stream: RecordingStream, /) -> None:
        """Record that this stream waits for another one."""
        self._cuda.note(f"{self.name} waits for {stream.name}")

    def synchronize(self) -> None:
        """Record that the host waits for this stream."""
        self._cuda.note(f"host waits for {self.name}")


class RecordingCuda:
    """A fake of CUDA that records the calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.contexts: set[int] = set()
        """Devices that have a context."""
        self.refuses = 0
        """The error code of each later ``register``; 0: ``register`` succeeds."""
        self.registered: dict[int, int] = {}
        """The pinned memory: address → length, bytes."""
        self.generators = {index: torch.Generator().manual_seed(0) for index in range(DEVICES)}
        """Device → its default generator."""
        self._thread = threading.local()

    @property
    def log(self) -> list[str]:
        """The recorded actions, in order."""
        return [call.what for call in self.calls]

    def note(self, what: str) -> None:
        """Record an action of the calling thread on its current device."""
        device = self.current_device()
        self.contexts.add(device)
        self.calls.append(Call(what, device, threading.current_thread().name))

    def current_device(self) -> int:
        """Return the current device of the calling thread."""
        device: int = getattr(self._thread, "device", 0)
        return device

    def launch(self) -> None:
        """Launch a kernel in the calling thread.

        Raises:
            RuntimeError: an earlier call of this thread left an error behind.
        """
        self.contexts.add(self.current_device())
        error, self._thread.error = getattr(self._thread, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def set_device(self, device: torch.device) -> None:
        """Set the current device of the calling thread."""
        self._thread.device = device.index

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Set the current device of the calling thread within a ``with`` block."""
        before = self.current_device()
        self._thread.device = device.index
        try:
            yield
        finally:
            self._thread.device = before

    def new_stream(self) -> RecordingStream:
        """Return a new stream of the current device."""
        self.contexts.add(self.current_device())
        return RecordingStream(self, "side", self.current_device())

    def current_stream(self) -> RecordingStream:
        """Return the script's stream on the current device."""
        return RecordingStream(self, "main", self.current_device())

    def copy(self, targets: list[Tensor], sources: list[Tensor], stream: RecordingStream) -> None:
        """Copy tensors at once, and record the copy."""
        assert stream.device == self.current_device()
        self.note(f"copy on {stream.name}")
        self.launch()
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)

    def wait(self, stream: RecordingStream) -> None:
        """Record that the host waits for a stream."""
        assert stream.device == self.current_device()
        stream.synchronize()

    def mark(self, stream: RecordingStream) -> float:
        """Return the time."""
        assert stream.device == self.current_device()
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float:
        """Return the time between two marks, seconds."""
        return end - begin

    def in_use(self) -> list[int]:
        """Return the devices that have a context, ascending."""
        return sorted(self.contexts)

    def random_state(self, device: int) -> Tensor:
        """Return the state of a device's generator."""
        return self.generators[device].get_state()

    def set_random_state(self, device: int, state: Tensor) -> None:
        """Set the state of a device's generator."""
        self.generators[device].set_state(state)

    def register(self, address: int, length: int) -> int:
        """Pin memory. Returns an error code, which is not 0 if pinning is refused or the memory is already pinned."""
        self.note("pin")
        code = ALREADY_REGISTERED if address in self.registered else self.refuses
        if code:
            self._thread.error = code
        else:
            self.registered[address] = length
        return code

    def unregister(self, address: int) -> int:
        """Unpin memory. Returns an error code, which is not 0 if the memory is not pinned."""
        self.note("unpin")
        code = 0 if self.registered.pop(address, 0) else NOT_REGISTERED
        if code:
            self._thread.error = code
        return code
