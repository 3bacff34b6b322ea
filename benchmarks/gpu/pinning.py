"""The rates of pinning and of copies into slots, and how long other calls to CUDA wait while slots are pinned.

Without a GPU only the host's part of a copy by way of the buffer is measured, with the fake of the tests.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.checkpoint_saves import scratch
from benchmarks.common import quantile
from benchmarks.gpu.parts import Line
from benchmarks.gpu.room import missing_shm
from everstep.slots.file import SlotFile
from everstep.training.copies.copier import Batch
from everstep.training.copies.cuda import Cuda, TorchCuda
from everstep.training.copies.cuda_copier import DeviceCopier
from everstep.training.copies.pinned_memory import PinnedMemory
from everstep.training.state.codec import encode
from tests.everstep.training.recording_cuda import RecordingCuda

SIZE, SMALL_SIZE = 4 << 30, 64 << 20
"""Bytes of a slot."""
ROUNDS = 3
LAUNCHES = 2000


class Slot:
    """A slot of which nothing is pinned, and the copier for it.

    Args:
        folder: A folder in shared memory.
        cuda: The calls to CUDA.
        device: The device of the tensors.
        size: Bytes of the slot.
    """

    def __init__(self, folder: Path, cuda: Cuda, device: torch.device, size: int) -> None:
        self.file = SlotFile(folder / "checkpoint", slots=2)
        self.address = self.file.begin(b"", size)
        self.file.make_present()
        self.file.commit(1)
        self.pinned = PinnedMemory(cuda, device, self.file)
        self.copier = DeviceCopier(cuda, device, self.pinned)

    def copy(self, source: Tensor) -> None:
        """Copy a tensor into the slot as a save does, and wait for it."""
        encoded = encode({"state": source})
        self.copier.follow()
        self.copier.copy(Batch(encoded.tensors, encoded.layout.specs, large=1 << 62), self.address)
        self.copier.wait(self.copier.mark())

    def pin_all(self) -> None:
        """Pin both slots in pieces, as between saves."""
        self.pinned.resume()
        while any(self.pinned.pinned(region.address) < region.room for region in self.file.regions()):
            time.sleep(0.001)
        self.pinned.close()


def measure(*, gpu: bool) -> Iterator[Line]:
    """Yield rates and times."""
    size = SIZE if gpu else SMALL_SIZE
    if why := missing_shm(2.1 * size / 1e9):
        yield Line("pinning", None, why=why)
        return
    with scratch() as folder:
        if not gpu:
            slot = Slot(folder, RecordingCuda(), torch.device("cuda", 1), size)
            source = torch.ones(size, dtype=torch.uint8)
            yield Line("copy by way of the buffer, on the host", rate(size, lambda: slot.copy(source)), "GB/s")
            return
        cuda, device = TorchCuda(), torch.device("cuda", torch.cuda.current_device())
        source = torch.ones(size, dtype=torch.uint8, device=device)
        slot = Slot(folder, cuda, device, size)
        host = torch.frombuffer((ctypes.c_char * size).from_address(slot.address), dtype=torch.uint8)
        yield Line("copy into pageable memory, by CUDA", rate(size, lambda: host.copy_(source)), "GB/s")
        yield Line("copy from pageable memory, by CUDA", rate(size, lambda: source.copy_(host)), "GB/s")
        yield Line("copy by way of the buffer", rate(size, lambda: slot.copy(source)), "GB/s")
        yield from whole(slot, cuda, size)
        yield from in_pieces(slot, cuda, size)
        yield Line("copy into the pinned slot", rate(size, lambda: slot.copy(source)), "GB/s")
        yield Line("copy from the pinned slot", rate(size, lambda: source.copy_(host)), "GB/s")


def whole(slot: Slot, cuda: Cuda, size: int) -> Iterator[Line]:
    """Pin a slot with one call while kernels are launched."""
    codes: list[int] = []
    took_s, waits = launches_beside(lambda: codes.append(cuda.register(slot.address, size)))
    yield Line("pin a slot with one call", size / took_s / 1e9, "GB/s", why=f"error {codes[0]}" if any(codes) else "")
    yield from waits_of("with one call", waits)
    began = time.perf_counter()
    cuda.unregister(slot.address)
    yield Line("unpin a slot", size / (time.perf_counter() - began) / 1e9, "GB/s")


def in_pieces(slot: Slot, cuda: Cuda, size: int) -> Iterator[Line]:
    """Pin both slots in pieces while kernels are launched."""
    _, alone = launches_beside(lambda: time.sleep(0.5))
    yield from waits_of("alone", alone)
    while slot.file.prepare():
        pass
    took_s, waits = launches_beside(slot.pin_all)
    yield Line("pin slots in pieces", 2 * size / took_s / 1e9, "GB/s")
    yield from waits_of("in pieces", waits)


def launches_beside(work: Callable[[], object]) -> tuple[float, list[float]]:
    """Run work in another thread, and launch kernels meanwhile; return its time and that of each launch, seconds."""
    value = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    waits = []
    began = time.perf_counter()
    thread.start()
    while thread.is_alive():
        before = time.perf_counter()
        value.add_(1)
        waits.append(time.perf_counter() - before)
        if len(waits) % LAUNCHES == 0:
            torch.cuda.synchronize()
    return time.perf_counter() - began, waits


def waits_of(beside: str, waits: list[float]) -> Iterator[Line]:
    """Yield how long launches took."""
    yield Line(f"launch of a kernel beside pinning {beside}, p99", 1e6 * quantile(waits, 0.99), "us")
    yield Line(f"launch of a kernel beside pinning {beside}, maximum", 1e3 * max(waits), "ms")


def rate(size: int, work: Callable[[], object]) -> float:
    """Return the best rate of a copy, GB/s."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return size / best / 1e9
