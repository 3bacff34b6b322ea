"""Copying tensors of a GPU into a slot, beside the GPU's other work.

Copies run on a stream of their own, behind the end of the step and before the next ``optimizer.step``; the host only
gives the orders. The memory of a slot is registered with CUDA when the slot is used first: copies into memory that is
not pinned would be slow and would not run beside anything. Slot by slot, because pinning takes a while for each GB, and
a restart needs one slot to restore from and one for its first save.

Tensors that forward may change are not copied aside on the device first: the next forward waits for their copy. They
are few and small (buffers), a second copy would take memory of the device, which is what is short, and for many of them
it would not be faster than the bus.

Run on one H200; not on several GPUs of one machine. ``cuda.py`` has the calls, and what stands for them where there is
no GPU.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch

from everstep.training.copier import Batch
from everstep.training.cuda import Cuda


class PinnedMemory:
    """Pieces of a mapping that are registered with CUDA, each from its first use until the end of the mapping.

    A thread of its own makes these calls: a failed call leaves an error behind for its thread, and in the script's
    thread the next kernel launch would raise that.

    Args:
        cuda: CUDA.
        device: Device of the tensors. Memory is pinned for all devices, but the call makes a context on this one.
    """

    def __init__(self, cuda: Cuda, device: torch.device) -> None:
        self._cuda, self._device = cuda, device
        self._pieces: dict[int, tuple[int, bool]] = {}
        """Address → length, and whether CUDA registered the memory."""

    def pin(self, address: int, length: int) -> None:
        """Register a piece unless it is registered. If that fails, copies are slow, and a warning reports it once.

        Args:
            address: Of allocated memory: CUDA makes all of its pages present.
            length: Bytes. A piece that has grown is registered anew.
        """
        before, pinned = self._pieces.get(address, (0, False))
        if length <= before:
            return

        def register() -> int:
            if pinned:
                self._cuda.unregister(address)
            return self._cuda.register(address, length)

        code = self._apart(register)
        if code and all(known for _, known in self._pieces.values()):
            warnings.warn(
                f"everstep: CUDA cannot pin {length / 1e6:.0f} MB of the checkpoint file (error {code}): copies "
                "will be slow. Raise the limit of locked memory (ulimit -l) or use fewer slots",
                RuntimeWarning,
                stacklevel=2,
            )
        self._pieces[address] = length, not code

    def unpin(self) -> None:
        """Unregister all pieces; to be called before the memory is unmapped."""
        taken = [address for address, (_, pinned) in self._pieces.items() if pinned]
        self._pieces.clear()
        if taken:
            self._apart(lambda: max(self._cuda.unregister(address) for address in taken))

    def _apart(self, call: Callable[[], int]) -> int:
        """Have a thread of its own make calls, on the right device.

        Returns:
            Their error code.
        """
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


class DeviceCopier:
    """Copies from one GPU, whatever the current device of the calling thread is.

    Args:
        cuda: CUDA.
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
        """Make later copies wait for the current stream: the rest of the step."""
        with self._cuda.on(self._device):
            self._stream.wait_stream(self._cuda.current_stream())

    def copy(self, batch: Batch, address: int) -> None:
        """Order the copies of a batch."""
        places, sources = batch.pairs(address)
        if sources:
            with self._cuda.on(self._device):
                self._cuda.copy(places, sources, self._stream)

    def pause(self) -> None:
        """Pause the current stream; the host does not wait."""
        with self._cuda.on(self._device):
            self._cuda.current_stream().wait_stream(self._stream)

    def wait(self) -> None:
        """Return when all is copied."""
        with self._cuda.on(self._device):
            self._cuda.wait(self._stream)

    def close(self) -> None:
        """Wait for the copies."""
        with self._cuda.on(self._device):
            self._stream.synchronize()
