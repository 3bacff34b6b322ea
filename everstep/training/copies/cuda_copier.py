"""Copies tensors of a GPU into a slot while the GPU does other work.

The copies run on a stream of their own, after the end of the step and before the next ``optimizer.step``; the host only
queues them. What is pinned of a slot is copied directly (``pinned_memory.py``), and the rest by way of a small buffer
(``staging.py``).

The next forward waits for the copies of tensors that it may change, such as buffers. They are few and small. Copying
them on the device first would need more of its memory, and is often not faster.

This module was run on one H200, and not on several GPUs of one machine. ``cuda.py`` has the calls to CUDA.
"""

from __future__ import annotations

from bisect import bisect_right

import torch
from torch import Tensor

from everstep.training.copies.copier import Batch, Copier
from everstep.training.copies.cuda import Cuda, Event
from everstep.training.copies.pinned_memory import PinnedMemory
from everstep.training.copies.staging import Staging


class DeviceCopier(Copier):
    """Copies from one GPU; the calling thread may have another current device.

    Args:
        cuda: The calls to CUDA.
        device: The GPU.
        pinned: The pinned memory of the process.
    """

    def __init__(self, cuda: Cuda, device: torch.device, pinned: PinnedMemory) -> None:
        self._cuda, self._device, self._pinned = cuda, device, pinned
        self._staging = Staging(cuda, pinned)
        with cuda.on(device):
            self._stream = cuda.new_stream()

    def enter_thread(self) -> None:
        """Make the GPU the thread's current device, and let other threads capture CUDA graphs."""
        self._cuda.set_device(self._device)
        self._cuda.relax_capture()

    def follow(self) -> None:
        """Make later copies wait for the current stream, and so for the rest of the step."""
        self._staging.forget()
        with self._cuda.on(self._device):
            self._stream.wait_stream(self._cuda.current_stream())

    def copy(self, batch: Batch, address: int) -> None:
        """Queue the copies of a batch; waits for copies into memory that is not pinned, except for the last ones."""
        targets, sources = batch.pairs(address)
        direct = len(targets)
        if self._staging.usable:
            direct = bisect_right(targets, address + self._pinned.pinned(address), key=_end)
        with self._cuda.on(self._device):
            if direct:
                self._cuda.copy(targets[:direct], sources[:direct], self._stream)
            self._staging.copy(targets[direct:], sources[direct:], self._stream)

    def can_pause(self) -> bool:
        """Whether no graph is captured: work in a graph cannot wait for work outside of it."""
        with self._cuda.on(self._device):
            return not self._cuda.is_capturing()

    def pause(self) -> None:
        """Make the current stream wait for the copies; the host does not wait."""
        with self._cuda.on(self._device):
            self._cuda.current_stream().wait_stream(self._stream)

    def mark(self) -> Event:
        """The time at which the device has done the step, which the host may have queued much earlier."""
        with self._cuda.on(self._device):
            return self._cuda.event(self._stream)

    def wait(self, mark: Event) -> float:
        """Return when all copies are done, with the seconds of the device's clock since a mark."""
        with self._cuda.on(self._device):
            self._staging.empty()
            done = self._cuda.event(self._stream)
            done.synchronize()
            return mark.elapsed_time(done) / 1000

    def close(self) -> None:
        """Wait for the copies."""
        with self._cuda.on(self._device):
            self._stream.synchronize()


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes
