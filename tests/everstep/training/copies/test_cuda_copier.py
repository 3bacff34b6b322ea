"""Copies from a GPU and the script's work wait for each other in the right order. CUDA is a fake."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.slots.file import SlotFile
from everstep.slots.reader import held
from everstep.training import checkpoint as checkpoint_module
from everstep.training.checkpoint import Checkpoint, Stateful
from everstep.training.copies import copier as module
from everstep.training.copies.copier import Batch
from everstep.training.copies.cuda_copier import DeviceCopier
from everstep.training.copies.pinned_memory import PinnedMemory
from everstep.training.state.codec import decode, encode
from tests.everstep.training.copies.test_pinned_memory import all_pinned, until
from tests.everstep.training.overlapped import Pause, same
from tests.everstep.training.recording_cuda import RecordingCuda
from tests.shm import shm_folder

GPU = torch.device("cuda", 1)
FOLLOW = ["side waits for main"]


def test_copies_wait_for_the_step_and_later_work_waits_for_the_copies(shm: Path) -> None:
    cuda = RecordingCuda()
    encoded = encode({"a": torch.arange(5.0), "b": torch.ones(3, 4).T})
    room = ctypes.create_string_buffer(encoded.layout.total_bytes)
    copier = DeviceCopier(cuda, GPU, PinnedMemory(cuda, GPU, SlotFile(shm / "c")))
    cuda.calls.clear()
    copier.follow()
    copier.copy(Batch(encoded.tensors, encoded.layout.specs, large=1 << 30), ctypes.addressof(room))
    copier.pause()
    copier.wait(copier.mark())
    # The host waits for what is in the buffer, and for all copies.
    assert cuda.log == [*FOLLOW, "copy on side", "main waits for side", "host waits for side", "host waits for side"]
    assert room.raw[:20] == bytes(torch.arange(5.0).view(torch.uint8).tolist())


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 40), st.booleans()), min_size=1, max_size=8))
    made = []
    for rows, columns, turned in shapes:
        tensor = torch.randint(1 << 30, (rows, columns), dtype=draw(st.sampled_from([torch.int32, torch.int64])))
        made.append(tensor.T if turned else tensor)
    return made


@settings(max_examples=60, deadline=None)
@given(state=tensors(), pinned=st.integers(0, 12), skipped=st.integers(0, 7))
def test_every_tensor_arrives_however_much_of_its_slot_is_pinned(
    state: list[torch.Tensor], pinned: int, skipped: int
) -> None:
    """No copy goes to memory that is pinned in part, which the fake refuses as CUDA does, or to another place."""
    with shm_folder() as folder, mock.patch.object(module, "PIECE", 4096):
        cuda, encoded = RecordingCuda(), encode({"all": state})
        size = encoded.layout.total_bytes
        file = SlotFile(folder / "c")
        memory = PinnedMemory(cuda, GPU, file)
        copier = DeviceCopier(cuda, GPU, memory)
        address = file.begin(b"", size)
        file.make_present()
        while memory.pinned(address) < min(pinned * 4096, size) and memory._pin_piece():
            pass
        ctypes.memset(address, 0xFF, size)
        chosen = range(skipped % len(encoded.tensors), len(encoded.tensors))
        specs = [encoded.layout.specs[index] for index in chosen]
        copier.follow()
        copier.copy(Batch([encoded.tensors[index] for index in chosen], specs, large=1 << 30), address)
        copier.wait(copier.mark())
        wanted = bytearray(b"\xff" * size)
        for index, spec in zip(chosen, specs, strict=True):
            raw = encoded.tensors[index].contiguous().reshape(-1).view(torch.uint8)
            wanted[spec.offset : spec.offset + spec.nbytes] = bytes(raw.tolist())
        assert ctypes.string_at(address, size) == bytes(wanted)
        file.close()


class Training:
    """A model with buffers on the fake device, its optimizer, and its checkpoint."""

    def __init__(self, cuda: RecordingCuda, path: Path) -> None:
        self.cuda, self.model = cuda, torch.nn.BatchNorm1d(30_000)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        things: dict[str, Stateful] = {"model": self.model, "optimizer": self.optimizer}
        self.checkpoint = Checkpoint(things, SlotFile(path), overlap=True, cuda=cuda)

    def step(self, number: int) -> None:
        self.model(torch.randn(4, 30_000)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.cuda.note("save begins")
        self.checkpoint.save(number)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models and optimizers have their tensors on device 1."""
    monkeypatch.setattr(Checkpoint, "_tensors", lambda _: [SimpleNamespace(device=GPU)])


def test_a_step_waits_on_the_device_and_the_commit_on_the_host(gpu: RecordingCuda, shm: Path) -> None:
    run = Training(gpu, shm / "c")
    for number in (1, 2, 3):
        run.step(number)
        run.checkpoint.wait()
    until(lambda: all_pinned(gpu, shm / "c", 2 * module.PIECE))
    gpu.calls.clear()
    run.step(4)
    run.checkpoint.wait()
    # Buffers and generators are copied first. The next forward pass waits for these copies. Then the thread copies the
    # rest, and the optimizer's step waits for that.
    now = [*FOLLOW, "copy on side", "copy on side", "main waits for side", "main waits for side"]
    assert gpu.log == ["save begins", *now, "copy on side", "host waits for side"]
    gpu.calls.clear()
    run.step(5)
    run.optimizer.step()
    run.checkpoint.wait()
    assert gpu.log.count("main waits for side") == 3 and gpu.log.count("host waits for side") == 1
    run.checkpoint.close()
    assert [slot.completed_steps for slot in held(shm / "c") if slot.valid] == [4, 5, 3]
    assert "unpin" not in gpu.log


@pytest.mark.usefixtures("on_device")
def test_nothing_is_pinned_from_the_beginning_of_a_save_until_it_is_copied(gpu: RecordingCuda, shm: Path) -> None:
    """Slots are pinned after that, in a thread of their own; until then saves copy by way of the buffer."""
    pause = Pause()
    with mock.patch.object(module, "PIECE", 1 << 16):
        run = Training(gpu, shm / "c")
        run.checkpoint.discard()
        assert gpu.log == ["pin"], "the buffer, before the first step"
        run.checkpoint.call_midway(pause.meet)
        pause.go.set()
        gpu.may_register.clear()
        run.step(1)
        run.checkpoint.wait()
        until(lambda: gpu.log.count("pin") == 2)  # the first piece of a slot takes long
        pause.reached.clear()
        pause.go.clear()
        run.step(2)
        assert pause.reached.wait(30)
        gpu.may_register.set()
        until(lambda: not any(thread.name == "everstep pins" for thread in threading.enumerate()))
        assert gpu.log.count("pin") == 2, "no piece was begun since the save began"
        assert all(gpu.pinned_copies), "a copy into memory that is not pinned would wait for the device"
        pause.go.set()
        run.optimizer.step()
        until(lambda: all_pinned(gpu, shm / "c", 2 << 16))
        run.checkpoint.close()
    assert {call.thread for call in gpu.calls if call.what == "pin"} == {"everstep pins"}
    assert [slot.completed_steps for slot in held(shm / "c") if slot.valid] == [1, 2]


@pytest.mark.usefixtures("on_device")
def test_a_save_into_a_slot_that_is_not_pinned_yet_is_no_measure_of_later_ones(gpu: RecordingCuda, shm: Path) -> None:
    """Otherwise ranks would save less often because of their first saves."""
    run = Training(gpu, shm / "c")
    run.checkpoint.discard()  # pins the buffer
    gpu.may_register.clear()
    run.step(1)
    run.checkpoint.wait()
    assert run.checkpoint.last_save == (0, 0.0)
    gpu.may_register.set()
    until(lambda: all_pinned(gpu, shm / "c", 2 * module.PIECE))
    run.step(2)
    run.checkpoint.wait()
    step, took_s = run.checkpoint.last_save
    assert step == 2 and took_s > 0
    run.checkpoint.close()


def test_where_nothing_can_be_pinned_the_first_save_is_a_measure(gpu: RecordingCuda, shm: Path) -> None:
    gpu.refuses = 2
    run = Training(gpu, shm / "c")
    with pytest.warns(RuntimeWarning, match="cannot pin"):
        run.step(1)
    run.checkpoint.wait()
    assert run.checkpoint.last_save[0] == 1
    run.checkpoint.close()


@pytest.mark.usefixtures("on_device")
def test_a_slot_is_pinned_before_a_state_is_restored_from_it(
    gpu: RecordingCuda, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Training(gpu, shm / "c")
    run.step(1)
    run.checkpoint.close()
    cuda = RecordingCuda()

    def decoding(*given: Any, **more: Any) -> Any:
        cuda.note("copies to the device")
        return decode(*given, **more)

    monkeypatch.setattr(checkpoint_module, "decode", decoding)
    again = Training(cuda, shm / "c")
    again.checkpoint.restore(1)
    assert cuda.log == ["pin", "pin", "copies to the device"], "the buffer and the slot"
    assert same(again.model.state_dict(), run.model.state_dict())
    again.step(2)
    again.checkpoint.close()
    assert "unpin" not in cuda.log, "it stays pinned"
