"""Copies from a GPU and the script's work wait for each other in the right order. CUDA is a fake."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from everstep.slots.file import SlotFile
from everstep.slots.reader import held
from everstep.training import copy_plan
from everstep.training.checkpoint import Checkpoint
from everstep.training.codec import encode
from everstep.training.copier import Batch
from everstep.training.cuda_copier import DeviceCopier, PinnedMemory
from tests.everstep.training.recording_cuda import RecordingCuda

GPU = torch.device("cuda", 1)


@pytest.fixture
def cuda() -> RecordingCuda:
    """A fake of CUDA that records the calls. Copies happen at once."""
    return RecordingCuda()


def test_copies_wait_for_the_step_and_later_work_waits_for_the_copies(cuda: RecordingCuda) -> None:
    encoded = encode({"a": torch.arange(5.0), "b": torch.ones(3, 4).T})
    room = ctypes.create_string_buffer(encoded.layout.total_bytes)
    copier = DeviceCopier(cuda, GPU)
    copier.follow()
    copier.copy(Batch(encoded.tensors, encoded.layout.specs, large=1 << 30), ctypes.addressof(room))
    copier.pause()
    copier.wait()
    assert cuda.log == ["side waits for main", "copy on side", "main waits for side", "host waits for side"]
    assert room.raw[:20] == bytes(torch.arange(5.0).view(torch.uint8).tolist())


def test_a_piece_is_pinned_once_and_again_after_it_grew(cuda: RecordingCuda) -> None:
    memory = PinnedMemory(cuda, GPU)
    memory.pin(64, 1000)
    memory.pin(4096, 1000)
    memory.pin(64, 900)
    memory.pin(4096, 2000)
    assert cuda.registered == {64: 1000, 4096: 2000}
    memory.unpin()
    memory.unpin()
    assert cuda.registered == {}
    assert cuda.log == ["pin", "pin", "unpin", "pin", "unpin", "unpin"]


def test_memory_that_cannot_be_pinned_leads_to_a_warning(cuda: RecordingCuda) -> None:
    cuda.refuses = 2
    memory = PinnedMemory(cuda, GPU)
    with pytest.warns(RuntimeWarning, match=r"cannot pin 3 MB of the checkpoint file \(error 2\)"):
        memory.pin(64, 3_000_000)
    memory.pin(64, 3_000_000)
    memory.pin(4_000_000, 3_000_000)  # warns no second time
    memory.unpin()
    assert cuda.log == ["pin", "pin"]
    cuda.launch()  # the failed pinning left no error in this thread


def test_an_error_of_pinning_is_raised_in_the_caller(cuda: RecordingCuda) -> None:
    def unknown(device: torch.device) -> None:
        raise RuntimeError(f"no {device}")

    cuda.set_device = unknown  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no cuda:1"):
        PinnedMemory(cuda, GPU).pin(64, 1000)


def test_a_step_waits_on_the_device_and_the_commit_on_the_host(
    cuda: RecordingCuda, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_plan, "_device", lambda _: "cuda:1")
    monkeypatch.setattr(copy_plan, "Batch", lambda tensors, specs, large: Batch(tensors, specs, large=1 << 60))
    model = torch.nn.BatchNorm1d(30_000)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = Checkpoint({"model": model, "optimizer": optimizer}, SlotFile(shm / "c"), overlap=True, cuda=cuda)
    model(torch.randn(4, 30_000)).sum().backward()
    checkpoint.save(1)
    checkpoint.wait()
    # Buffers and generators are copied first. The next forward pass waits for these copies. Then the thread copies the
    # rest, and the optimizer's step waits for that.
    start = ["side waits for main", "copy on side", "copy on side", "main waits for side", "main waits for side"]
    end = ["copy on side", "host waits for side"]
    assert cuda.log == [*start, "pin", *end]
    cuda.calls.clear()
    checkpoint.save(2)
    optimizer.step()
    checkpoint.wait()
    assert cuda.log.count("main waits for side") == 3 and cuda.log.count("host waits for side") == 1
    cuda.calls.clear()
    checkpoint.save(3)  # the file grew by the optimizer's new state, so it is mapped elsewhere
    checkpoint.wait()
    assert cuda.log == [*start, "unpin", "unpin", "pin", *end]  # both used slots are unpinned
    checkpoint.close()
    assert cuda.log[-1] == "unpin" and not cuda.registered
    assert [slot.completed_steps for slot in held(shm / "c") if slot.valid] == [1, 2, 3]
