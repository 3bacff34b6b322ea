"""The rules of CUDA on which everstep relies. The same tests run with the fake and with the machine's last device."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from everstep.slots.file import SlotFile
from everstep.slots.reader import held
from everstep.training import checkpoint as checkpoint_module
from everstep.training.checkpoint import Checkpoint
from everstep.training.copies.copier import Batch
from everstep.training.copies.cuda import Cuda, TorchCuda
from everstep.training.copies.cuda_copier import DeviceCopier
from everstep.training.copies.pinned_memory import PinnedMemory
from everstep.training.state.codec import decode, encode
from tests.everstep.training.copies.test_pinned_memory import until
from tests.everstep.training.overlapped import Pause
from tests.everstep.training.recording_cuda import RecordingCuda, stand_in_for_gpu


class Platform(Protocol):
    """A device, and what a test reads of it."""

    cuda: Cuda
    device: torch.device

    def launch(self) -> None:
        """Run a kernel from the calling thread."""

    def capture(self) -> AbstractContextManager[None]:
        """Capture a CUDA graph in the calling thread; raises an error at the end if the capture was broken."""

    def contexts(self) -> set[int]:
        """Return the devices that have a context of this process."""


class Fake:
    """Device 1 of a machine without devices."""

    def __init__(self) -> None:
        self.cuda = self.recorded = RecordingCuda()
        self.device = torch.device("cuda", 1)
        self.capture = self.recorded.capture

    def launch(self) -> None:
        with self.recorded.on(self.device):
            self.recorded.launch()

    def contexts(self) -> set[int]:
        return set(self.recorded.contexts)


class Real:
    """The last device of this machine."""

    def __init__(self) -> None:
        self.cuda = TorchCuda()
        self.device = torch.device("cuda", torch.cuda.device_count() - 1)

    def launch(self) -> None:
        torch.ones(1, device=self.device).add_(1)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            graph, a = torch.cuda.CUDAGraph(), torch.ones(1, device=self.device)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                a.add_(1)
                yield
            graph.replay()

    def contexts(self) -> set[int]:
        return {index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)}


PLATFORMS: list[type[Fake] | type[Real]] = [Fake, *([Real] if torch.cuda.is_available() else [])]


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    """Return a platform. The fake's tensors are in the host's memory, but are copied as if they were on its device."""
    with stand_in_for_gpu() if request.param is Fake else contextlib.nullcontext():
        yield request.param()


def there(platform: Platform, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors on the device, or for the fake, the tensors themselves."""
    return [tensor.to(platform.device) if isinstance(platform, Real) else tensor for tensor in tensors]


def in_a_thread(work: Callable[[], None]) -> None:
    """Run a function in a new thread, whose current device is the first device."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not errors, errors


def test_a_thread_copies_from_its_own_device_only(platform: Platform, shm: Path) -> None:
    before = platform.contexts()
    a, b = there(platform, torch.arange(5.0), torch.ones(3, 4).T)
    encoded = encode({"a": a, "b": b})
    room = ctypes.create_string_buffer(encoded.layout.total_bytes)
    pinned = PinnedMemory(platform.cuda, platform.device, SlotFile(shm / "c"))
    copier = DeviceCopier(platform.cuda, platform.device, pinned)

    def copy() -> None:
        copier.follow()
        copier.copy(Batch(encoded.tensors, encoded.layout.specs, large=1 << 60), ctypes.addressof(room))
        copier.pause()
        copier.wait(copier.mark())

    in_a_thread(copy)  # here, the copier itself sets the device
    assert room.raw[:20] == bytes(torch.arange(5.0).view(torch.uint8).tolist())
    ctypes.memset(room, 0, len(room))

    def enter_and_copy() -> None:
        copier.enter_thread()
        copy()

    in_a_thread(enter_and_copy)
    assert room.raw[:20] == bytes(torch.arange(5.0).view(torch.uint8).tolist())
    copier.close()
    assert platform.contexts() - before == {platform.device.index} - before


def test_an_error_is_left_to_the_thread_that_made_the_call(platform: Platform) -> None:
    memory = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def twice() -> None:
        platform.cuda.set_device(platform.device)
        assert platform.cuda.register(address, len(memory)) == 0
        assert platform.cuda.register(address, len(memory)) != 0
        with pytest.raises(RuntimeError):
            platform.launch()
        platform.launch()  # the error was raised only once
        assert platform.cuda.unregister(address) == 0

    in_a_thread(twice)
    platform.launch()


def test_what_cannot_be_pinned_hurts_no_kernel(platform: Platform, shm: Path) -> None:
    memory = mmap.mmap(-1, 1 << 16)
    first, second = (PinnedMemory(platform.cuda, platform.device, SlotFile(shm / "c")) for _ in range(2))
    assert first.pin_buffer(memory)
    with pytest.warns(RuntimeWarning, match="cannot pin"):
        assert not second.pin_buffer(memory)
    platform.launch()


def test_a_thread_with_a_relaxed_capture_mode_breaks_no_capture(platform: Platform) -> None:
    """A thread without it does, so that the capture fails."""
    memory = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def pin_and_wait() -> None:
        platform.cuda.relax_capture()
        platform.cuda.set_device(platform.device)
        assert platform.cuda.register(address, len(memory)) == 0
        platform.cuda.event(platform.cuda.new_stream()).synchronize()
        assert platform.cuda.unregister(address) == 0

    def pin_without_it() -> None:
        platform.cuda.set_device(platform.device)
        assert platform.cuda.register(address, len(memory)) != 0

    with platform.capture():
        in_a_thread(pin_and_wait)
    with pytest.raises(RuntimeError), platform.capture():
        in_a_thread(pin_without_it)


def test_a_save_breaks_no_capture_under_way(platform: Platform, shm: Path) -> None:
    """Copies are queued and awaited, and slots are pinned, while the script captures a graph."""
    parameter = torch.nn.Parameter(there(platform, torch.randn(1 << 16))[0])
    optimizer = torch.optim.AdamW([parameter])
    pause = Pause()
    checkpoint = Checkpoint({"optimizer": optimizer}, SlotFile(shm / "c"), overlap=True, cuda=platform.cuda)
    checkpoint.call_midway(pause.meet)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(1)
    assert pause.reached.wait(30)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with platform.capture():
        pause.go.set()
        other.step()  # the step of a graph waits on the host, since it cannot wait for work outside of the graph
        checkpoint.wait()
        until(lambda: not any(thread.name == "everstep pins" for thread in threading.enumerate()))
    platform.launch()
    checkpoint.close()
    assert [slot.completed_steps for slot in held(shm / "c") if slot.valid] == [1]


def test_saves_and_restores_use_the_rank_s_device_alone(platform: Platform, shm: Path) -> None:
    before = platform.contexts()
    model = torch.nn.Linear(300, 300)
    if isinstance(platform, Real):
        model.to(platform.device)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = Checkpoint(
        {"model": model, "optimizer": optimizer}, SlotFile(shm / "c"), overlap=True, cuda=platform.cuda
    )
    for step in (1, 2, 3):
        optimizer.zero_grad()
        model(*there(platform, torch.randn(4, 300))).sum().backward()
        optimizer.step()
        kept = model.weight.detach().cpu().clone()
        checkpoint.save(step)
        checkpoint.wait()
    assert {slot.completed_steps for slot in held(shm / "c") if slot.valid} >= {2, 3}
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.restore(3)
    assert torch.equal(model.weight.detach().cpu(), kept)
    checkpoint.close()
    assert platform.contexts() - before == {platform.device.index} - before
    if isinstance(platform, Fake):
        threads = {call.thread for call in platform.recorded.calls if call.what in {"pin", "unpin"}}
        assert threads == {"everstep pins"}
        assert {call.thread for call in platform.recorded.calls if call.what == "copy on side"} == {
            threading.current_thread().name,  # it copies tensors that forward may change
            "everstep saves",
        }
        assert {call.device for call in platform.recorded.calls} == {1}


@pytest.mark.parametrize(("devices", "current"), [(["cuda:1"], 1), (["cpu", "cuda:1"], 1), (["cuda:0", "cuda:1"], 0)])
def test_optimizer_state_comes_back_to_the_rank_s_device(
    shm: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], current: int
) -> None:
    """A script names its device in each call, without setting a current device."""
    cuda, seen = RecordingCuda(), []

    def decoding(*given: Any, **more: Any) -> Any:
        seen.append(cuda.current_device())
        return decode(*given, **more)

    checkpoint = Checkpoint({}, SlotFile(shm / "c"), cuda=cuda)
    checkpoint.save(1)
    checkpoint.wait()
    monkeypatch.setattr(checkpoint_module, "decode", decoding)
    monkeypatch.setattr(checkpoint, "_tensors", lambda: [SimpleNamespace(device=torch.device(one)) for one in devices])
    checkpoint.restore(1)
    checkpoint.close()
    assert (seen, cuda.current_device()) == ([current], 0)


def test_generators_of_all_devices_in_use_are_saved_and_restored(platform: Platform, shm: Path) -> None:
    """A script that names its device in each call may have another current device."""
    platform.launch()
    device = platform.device.index
    checkpoint = Checkpoint({}, SlotFile(shm / "c"), cuda=platform.cuda)
    used = sorted({0, device})

    def states() -> list[list[int]]:
        return [platform.cuda.random_state(index).tolist() for index in used]

    for index in used:
        platform.cuda.set_random_state(index, seeded(platform, 7 + index))
    before = states()
    checkpoint.save(1)
    checkpoint.wait()
    for index in used:
        platform.cuda.set_random_state(index, seeded(platform, 99))
    assert states() != before
    checkpoint.restore(1)
    assert states() == before
    checkpoint.close()


def seeded(platform: Platform, seed: int) -> Tensor:
    """Return the state of a generator of the platform."""
    device = platform.device if isinstance(platform, Real) else "cpu"
    return torch.Generator(device).manual_seed(seed).get_state()


def test_the_time_of_copies_is_measured_on_the_device_from_a_thread(platform: Platform, shm: Path) -> None:
    pinned = PinnedMemory(platform.cuda, platform.device, SlotFile(shm / "c"))
    copier = DeviceCopier(platform.cuda, platform.device, pinned)
    mark = copier.mark()
    times: list[float] = []

    def measure() -> None:
        times.append(copier.wait(mark))

    in_a_thread(measure)
    copier.close()
    assert times[0] >= 0
