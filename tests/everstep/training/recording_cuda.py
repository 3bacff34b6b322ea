"""A fake of CUDA that records its calls, for machines without a GPU.

It follows rules of CUDA that are easily broken. Each thread has a current device, which is device 0 at first. Any
action on a device creates a context there. If a call leaves an error behind, the next kernel launch of the same thread
raises it. While a thread captures a graph, calls that pin memory or wait break the capture, unless the capture mode of
their thread is relaxed. Memory of the host that is registered in part, or in several parts, is refused for a copy.
Copies happen at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from everstep.training.copies import copy_plan
from everstep.training.copies.copier import Batch

ALREADY_REGISTERED = 712
"""The value of cudaErrorHostMemoryAlreadyRegistered."""
DEVICES = 2
NOT_REGISTERED = 713
"""The value of cudaErrorHostMemoryNotRegistered."""
CAPTURE_UNSUPPORTED = 900
"""The value of cudaErrorStreamCaptureUnsupported."""


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
        """Record that this stream waits for another one. It breaks a capture, whose work cannot wait for other work."""
        self._cuda.note(f"{self.name} waits for {stream.name}")
        if self._cuda.is_capturing():
            self._cuda.break_capture()

    def synchronize(self) -> None:
        """Record that the host waits for this stream.

        Raises:
            RuntimeError: this broke the capture of a graph.
        """
        self._cuda.note(f"host waits for {self.name}")
        if self._cuda.breaks_capture():
            raise RuntimeError(f"CUDA error {CAPTURE_UNSUPPORTED}")


@dataclass(frozen=True, slots=True)
class RecordingEvent:
    """An event of a stream."""

    stream: RecordingStream
    at_s: float
    """When it was recorded, seconds of the performance counter."""

    def synchronize(self) -> None:
        """Record that the host waits for the stream."""
        self.stream.synchronize()

    def elapsed_time(self, end: RecordingEvent, /) -> float:
        """Return the time until a later event, milliseconds."""
        return (end.at_s - self.at_s) * 1000


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
        self.pinned_copies: list[bool] = []
        """For each tensor that was copied, whether the copy went to pinned memory."""
        self.generators = {index: torch.Generator().manual_seed(0) for index in range(DEVICES)}
        """Device → its default generator."""
        self.may_register = threading.Event()
        """While it is not set, calls of ``register`` do not return."""
        self.may_register.set()
        self._thread = threading.local()
        self._captures, self._broken = 0, False
        """The thread that captures a graph; 0: none."""

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

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph within a ``with`` block.

        Raises:
            RuntimeError: a call broke the capture.
        """
        self._captures, self._broken = threading.get_ident(), False
        yield
        self._captures = 0
        if self._broken:
            raise RuntimeError("the capture was broken")

    def breaks_capture(self) -> bool:
        """Whether a call of the calling thread that pins memory or waits breaks a capture; if so, it is broken now."""
        breaks = bool(self._captures) and not getattr(self._thread, "relaxed", False)
        if breaks:
            self.break_capture()
        return breaks

    def break_capture(self) -> None:
        """Let the capture of the graph fail."""
        self._broken = True

    def is_capturing(self) -> bool:
        """Return whether the calling thread captures a graph."""
        return self._captures == threading.get_ident()

    def relax_capture(self) -> None:
        """Make the capture mode of the calling thread relaxed."""
        self._thread.relaxed = True

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
        """Copy tensors at once, and record the copy.

        Raises:
            RuntimeError: the memory of a target is registered in part.
        """
        assert stream.device == self.current_device()
        self.note(f"copy on {stream.name}")
        self.pinned_copies += [self._is_pinned(target.data_ptr(), target.nbytes) for target in targets]
        self.launch()
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)

    def event(self, stream: RecordingStream) -> RecordingEvent:
        """Return an event of a stream, which has no work left."""
        assert stream.device == self.current_device()
        return RecordingEvent(stream, time.perf_counter())

    def in_use(self) -> list[int]:
        """Return the devices that have a context, ascending."""
        return sorted(self.contexts)

    def random_state(self, device: int) -> Tensor:
        """Return the state of a device's generator."""
        return self.generators[device].get_state()

    def set_random_state(self, device: int, state: Tensor) -> None:
        """Set the state of a device's generator."""
        self.generators[device].set_state(state)

    def _is_pinned(self, address: int, length: int) -> bool:
        """Whether memory is registered as a whole.

        Raises:
            RuntimeError: it is registered in part.
        """
        parts = [
            (begin, size)
            for begin, size in self.registered.copy().items()
            if begin < address + length and address < begin + size
        ]
        if parts and not (parts[0][0] <= address and address + length <= sum(parts[0])):
            raise RuntimeError("CUDA error 1")
        return bool(parts)

    def register(self, address: int, length: int) -> int:
        """Pin memory. Returns an error code, which is not 0 if pinning is refused or the memory is already pinned."""
        self.note("pin")
        assert self.may_register.wait(30)
        code = ALREADY_REGISTERED if address in self.registered else self.refuses
        code = CAPTURE_UNSUPPORTED if self.breaks_capture() else code
        if code:
            self._thread.error = code
        else:
            self.registered[address] = length
        return code

    def unregister(self, address: int) -> int:
        """Unpin memory. Returns an error code, which is not 0 if the memory is not pinned."""
        self.note("unpin")
        code = 0 if self.registered.pop(address, 0) else NOT_REGISTERED
        code = CAPTURE_UNSUPPORTED if self.breaks_capture() else code
        if code:
            self._thread.error = code
        return code


@contextlib.contextmanager
def stand_in_for_gpu() -> Iterator[RecordingCuda]:
    """Return a fake; within the ``with`` block savers copy all tensors as if they were on its device 1."""
    with (
        mock.patch.object(copy_plan, "_device", lambda _: "cuda:1"),
        mock.patch.object(copy_plan, "Batch", lambda tensors, specs, large: Batch(tensors, specs, large=1 << 60)),
    ):
        yield RecordingCuda()
