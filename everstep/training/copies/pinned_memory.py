"""Registers the slots of a checkpoint file with CUDA (*pins* them), so that copies from a GPU are fast.

CUDA registers about 10 GB a second, and other calls of the process may have to wait meanwhile. So a thread pins the
slots while no save copies, piece by piece, the slot of the next save first. A copy into memory that is not pinned yet
takes another way (``staging.py``). Only a slot from which a state is restored is pinned as a whole, before it is read.

Memory that is unmapped while it is registered must never be used again: CUDA would copy to the pages that were there
before. So a registered slot stays mapped, also after its file is closed, until it grows or the process ends. The end of
the process releases everything at once. That is faster than to unregister the memory piece by piece.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from everstep.errors import CheckpointError
from everstep.slots.file import SlotFile
from everstep.slots.mapping import Region
from everstep.training.copies import copier
from everstep.training.copies.cuda import Cuda

_registered: dict[int, Any] = {}
"""Address of registered memory → an object that keeps it mapped."""


class PinnedMemory:
    """The registered memory of one process: slots of a file, and buffers.

    Separate threads make the calls to CUDA, since a failed call leaves an error behind for its thread. In the script's
    thread, the next kernel launch would raise that error.

    Args:
        cuda: The calls to CUDA.
        device: Device of the tensors. The memory is pinned for all devices, but the calls make a context on this one.
        file: The file.
    """

    def __init__(self, cuda: Cuda, device: torch.device, file: SlotFile) -> None:
        self._cuda, self._device, self._file = cuda, device, file
        self._ends: dict[int, list[int]] = {}
        """Address of a slot → ends of its registered parts, which follow each other from its beginning on."""
        self._refused = False
        """Whether CUDA has refused to register memory; then nothing more is registered."""
        self._lock = threading.Lock()
        """The lock for registering and unregistering slots. A thread that has it does not wait for the file's memory,
        whose lock is taken first."""
        self._may_pin = False
        self._thread: threading.Thread | None = None
        """The thread that prepares and pins slots, while there is something to do."""
        file.before_free = self._unpin

    def pinned(self, address: int) -> int:
        """Number of bytes of the slot at an address that are pinned, from its beginning on."""
        ends = self._ends.get(address)
        return ends[-1] if ends else 0

    def is_done(self, address: int, size: int) -> bool:
        """Whether the first ``size`` bytes of the slot at an address are pinned, or stay unpinned because CUDA has
        refused to register memory."""
        return self._refused or self.pinned(address) >= size

    def resume(self) -> None:
        """Prepare and pin the slots in a thread, until ``pause`` is called."""
        with self._lock:
            self._may_pin = True
            if self._thread is None and self._is_left():
                self._thread = threading.Thread(target=self._pin_slots, name="everstep pins", daemon=True)
                self._thread.start()

    def pause(self) -> None:
        """Begin no other piece; does not wait for the current one."""
        self._may_pin = False

    def close(self) -> None:
        """End the thread. What is registered stays so until the process ends."""
        self.pause()
        if (thread := self._thread) is not None:
            thread.join()

    def pin_slot(self, address: int) -> None:
        """Pin the slot at an address as a whole, and return when that is done.

        A copy to the device could be refused if its memory were registered in several parts.
        """
        if self._refused:
            return
        try:
            region = self._file.allocated_region(address)
        except CheckpointError:
            return  # there is no room, so the slot is read as it is

        def pin() -> None:
            self._unregister(address)
            self._register_slot(region, region.room)

        with self._lock:
            if self._ends.get(address) != [region.room]:
                self._apart(pin)

    def pin_buffer(self, memory: mmap.mmap) -> bool:
        """Pin memory that is not part of the file, until the process ends; returns whether CUDA did it."""
        kept = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(kept)
        codes: list[int] = []
        self._apart(lambda: codes.append(self._register(address, len(memory))))
        if codes == [0]:
            _registered[address] = kept
        return codes == [0]

    def _is_left(self) -> bool:
        """Whether a slot is not prepared, or not pinned."""
        return any(
            region.present < region.room or not (self._refused or self.pinned(region.address) == region.room)
            for region in self._file.regions()
        )

    def _pin_slots(self) -> None:
        """Prepare and pin piece by piece. When no piece is left, or after ``pause``, the thread ends."""
        self._enter_thread()
        more = True
        while True:
            with self._lock:
                if not (more and self._may_pin):
                    self._thread = None
                    return
                more = self._pin_piece()
            if not more:
                more = self._file.prepare()  # without the lock, which ``_unpin`` takes while its caller locks the file

    def _pin_piece(self) -> bool:
        """Pin the next piece; False: it is not present yet, or there is none."""
        for region in self._file.regions():
            done = self.pinned(region.address)
            if done < region.room and not self._refused:
                stop = min(done + copier.PIECE, region.room)
                if region.present >= stop:
                    self._register_slot(region, stop)
                return region.present >= stop
        return False

    def _register_slot(self, region: Region, stop: int) -> None:
        """Register what follows in a slot, up to byte ``stop``."""
        address, done = region.address, self.pinned(region.address)
        if not self._register(address + done, stop - done):
            assert region.memory is not None
            _registered.setdefault(address, ctypes.c_char.from_buffer(region.memory))
            self._ends.setdefault(address, []).append(stop)
            region.present = max(region.present, stop)

    def _register(self, address: int, length: int) -> int:
        """Register memory; returns CUDA's error code."""
        code = self._cuda.register(address, length)
        if code and not self._refused:
            self._refused = True
            warnings.warn(
                f"everstep: CUDA cannot pin {length / 1e6:.0f} MB of the checkpoint's memory (error {code}): copies "
                "will be slower. Raise the limit of locked memory (ulimit -l) or use fewer slots",
                RuntimeWarning,
                stacklevel=2,
            )
        return code

    def _unpin(self, address: int) -> None:
        """Unregister the memory at which a slot was before it grew, before it is freed."""
        with self._lock:
            if address in self._ends:
                self._apart(lambda: self._unregister(address))

    def _unregister(self, address: int) -> None:
        for start in [0, *self._ends.pop(address, [])][:-1]:
            self._cuda.unregister(address + start)
        _registered.pop(address, None)

    def _apart(self, call: Callable[[], object]) -> None:
        """Make calls in a separate thread, and raise its error."""
        errors: list[BaseException] = []

        def make() -> None:
            try:
                self._enter_thread()
                call()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=make, name="everstep pins", daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def _enter_thread(self) -> None:
        self._cuda.set_device(self._device)
        self._cuda.relax_capture()
