"""A fake of CUDA that writes down what it is told, for machines without a GPU.

It keeps to the rules by which mistakes are made: each thread has a current device, which is device 0 at first; whatever
is done on a device makes a context there; and an error that a call leaves behind is raised by the next kernel launch of
the same thread. Copies happen at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""
DEVICES = 2
NOT_REGISTERED = 713
"""cudaErrorHostMemoryNotRegistered."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call."""

    what: str
    device: int
    """The thread's current device."""
    thread: str
    """Name of the thread."""


class RecordingStream:
    """A stream without work, since the fake does all work at once."""

    def __init__(self, cuda: RecordingCuda, name: str, device: int) -> None:
        self.name, self.device = name, device
        self._cuda = cuda

    def wait_stream(self, stream: RecordingStream, /) -> None:
        """Written down."""
        self._cuda.note(f"{self.name} waits for {stream.name}")

    def synchronize(self) -> None:
        """Written down."""
        self._cuda.note(f"host waits for {self.name}")


class RecordingCuda:
    """A fake of CUDA that records the calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.contexts: set[int] = set()
        """Devices on which anything was done."""
        self.refuses = 0
        """Error code of every further ``register``; 0: it pins."""
        self.registered: dict[int, int] = {}
        """Address → length."""
        self.generators = {index: torch.Generator().manual_seed(0) for index in range(DEVICES)}
        """Device → its default generator."""
        self._thread = threading.local()

    @property
    def log(self) -> list[str]:
        """What was told, in order."""
        return [call.what for call in self.calls]

    def note(self, what: str) -> None:
        """Write down what the calling thread does on its current device."""
        device = self.current_device()
        self.contexts.add(device)
        self.calls.append(Call(what, device, threading.current_thread().name))

    def current_device(self) -> int:
        """Of the calling thread."""
        device: int = getattr(self._thread, "device", 0)
        return device

    def launch(self) -> None:
        """A kernel launch of the calling thread.

        Raises:
            RuntimeError: a call of this thread before left an error behind.
        """
        self.contexts.add(self.current_device())
        error, self._thread.error = getattr(self._thread, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def set_device(self, device: torch.device) -> None:
        """Make a device this thread's current one."""
        self._thread.device = device.index

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """A device as this thread's current one."""
        before = self.current_device()
        self._thread.device = device.index
        try:
            yield
        finally:
            self._thread.device = before

    def new_stream(self) -> RecordingStream:
        """A stream of the current device."""
        self.contexts.add(self.current_device())
        return RecordingStream(self, "side", self.current_device())

    def current_stream(self) -> RecordingStream:
        """The current device's stream of the script."""
        return RecordingStream(self, "main", self.current_device())

    def copy(self, targets: list[Tensor], sources: list[Tensor], stream: RecordingStream) -> None:
        """Copy at once."""
        assert stream.device == self.current_device()
        self.note(f"copy on {stream.name}")
        self.launch()
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)

    def wait(self, stream: RecordingStream) -> None:
        """Written down."""
        assert stream.device == self.current_device()
        stream.synchronize()

    def in_use(self) -> list[int]:
        """Devices with a context."""
        return sorted(self.contexts)

    def random_state(self, device: int) -> Tensor:
        """Of a device's generator."""
        return self.generators[device].get_state()

    def set_random_state(self, device: int, state: Tensor) -> None:
        """Of a device's generator."""
        self.generators[device].set_state(state)

    def register(self, address: int, length: int) -> int:
        """Pin, unless it is refused or done already."""
        self.note("pin")
        code = ALREADY_REGISTERED if address in self.registered else self.refuses
        if code:
            self._thread.error = code
        else:
            self.registered[address] = length
        return code

    def unregister(self, address: int) -> int:
        """Undo it."""
        self.note("unpin")
        code = 0 if self.registered.pop(address, 0) else NOT_REGISTERED
        if code:
            self._thread.error = code
        return code
