"""Copies tensors of a GPU into a slot while the GPU does other work.

The copies run on a stream of their own, after the end of the step and before the next ``optimizer.step``; the host only
queues them. The memory of a slot is registered with CUDA (pinned) when the slot is first used, since copies into other
memory are slow and do not overlap other work. Each slot is pinned separately: pinning takes time for each GB, and a
restart needs only one slot to restore from and one for its first save.

The next forward waits for the copies of tensors that it may change, such as buffers. They are few and small. Copying
them on the device first would need more of its memory, and is often not faster.

This module was run on one H200, and not on several GPUs of one machine. ``cuda.py`` has the calls to CUDA.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from everstep.training.copier import Batch, Copier
from everstep.training.cuda import Cuda


class PinnedMemory:
    """Registers pieces of a mapping with CUDA, each from its first use until the end of the mapping.

    A separate thread makes these calls. A failed call leaves an error behind for its thread. In the script's thread,
    the next kernel launch would raise that error.

    Args:
        cuda: The calls to CUDA.
        device: Device of the tensors. The memory is pinned for all devices, but the call makes a context on this one.
    """

    def __init__(self, cuda: Cuda, device: torch.device) -> None:
        self._cuda, self._device = cuda, device
        self._pieces: dict[int, tuple[int, bool]] = {}
        """Address → length, and whether CUDA registered the memory."""

    def pin(self, address: int, length: int) -> None:
        """Register a piece, unless it is registered. If that fails, copies are slow; a warning reports it once.

        Args:
            address: Beginning of the piece. Its memory has to be allocated, since CUDA makes all its pages present.
            length: Bytes of the piece. A piece that has grown is registered again.
        """
        before, pinned = self._pieces.get(address, (0, False))
        if length <= before:
            return

        def register() -> int:
            if pinned:
                self._cuda.unregister(address)
            return self._cuda.register(address, length)

        code = self._apart(register)
        if code and all(registered for _, registered in self._pieces.values()):
            warnings.warn(
                f"everstep: CUDA cannot pin {length / 1e6:.0f} MB of the checkpoint file (error {code}): copies "
                "will be slow. Raise the limit of locked memory (ulimit -l) or use fewer slots",
                RuntimeWarning,
                stacklevel=2,
            )
        self._pieces[address] = length, not code

    def unpin(self) -> None:
        """Unregister all pieces, before the memory is unmapped."""
        addresses = [address for address, (_, pinned) in self._pieces.items() if pinned]
        self._pieces.clear()
        if addresses:
            self._apart(lambda: max(self._cuda.unregister(address) for address in addresses))

    def _apart(self, call: Callable[[], int]) -> int:
        """Make calls in a separate thread, with the right current device; returns their error code."""
        answers: list[int | BaseException] = []

        def make() -> None:
            try:
                self._cuda.set_device(self._device)
                answers.append(call())
            except BaseException as error:
                answers.append(error)

        thread = threading.Thread(target=make, name="everstep pins", daemon=True)
        thread.start()
        thread.join()
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]


class DeviceCopier(Copier):
    """Copies from one GPU; the calling thread may have another current device.

    Args:
        cuda: The calls to CUDA.
        device: The GPU.
    """

    def __init__(self, cuda: Cuda, device: torch.device) -> None:
        self._cuda, self._device = cuda, device
        with cuda.on(device):
            self._stream = cuda.new_stream()

    def enter_thread(self) -> None:
        """Make the GPU the thread's current device."""
        self._cuda.set_device(self._device)

    def follow(self) -> None:
        """Make later copies wait for the current stream, and so for the rest of the step."""
        with self._cuda.on(self._device):
            self._stream.wait_stream(self._cuda.current_stream())

    def copy(self, batch: Batch, address: int) -> None:
        """Queue the copies of a batch."""
        targets, sources = batch.pairs(address)
        if sources:
            with self._cuda.on(self._device):
                self._cuda.copy(targets, sources, self._stream)

    def pause(self) -> None:
        """Make the current stream wait for the copies; the host does not wait."""
        with self._cuda.on(self._device):
            self._cuda.current_stream().wait_stream(self._stream)

    def wait(self) -> None:
        """Return when all copies are done."""
        with self._cuda.on(self._device):
            self._cuda.wait(self._stream)

    def mark(self) -> Any:
        """The time at which the device has done the step, which the host may have queued much earlier."""
        with self._cuda.on(self._device):
            return self._cuda.mark(self._stream)

    def since_s(self, mark: Any) -> float:
        """Seconds of the device's clock since a mark."""
        with self._cuda.on(self._device):
            return self._cuda.elapsed_s(mark, self._cuda.mark(self._stream))

    def close(self) -> None:
        """Wait for the copies."""
        with self._cuda.on(self._device):
            self._stream.synchronize()
