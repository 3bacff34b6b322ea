"""Copies from a GPU, as far as they can be looked at without one: in which order streams wait for what."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from everstep.slot_reader import held
from everstep.slots import SlotFile
from everstep.training import plan
from everstep.training.checkpoint import Checkpoint
from everstep.training.codec import encode
from everstep.training.copier import Batch
from everstep.training.pinned import DeviceCopier, PinnedMemory


class Stream:
    """Writes down what it is told to wait for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA as a log of what it was told; copies happen at once."""
    log: list[str] = []
    main = Stream("main", log)

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking  # else the host spins while it waits

        def record(self, stream: Stream) -> None:
            self.stream = stream

        def synchronize(self) -> None:
            self.stream.synchronize()

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append("off")

    def register(address: int, length: int, flags: int) -> int:
        log.append(f"pin {address} {length} {flags}")
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: log.append(f"unpin {address}")
    )
    for name, value in {
        "Stream": lambda device: Stream("side", log),
        "Event": Event,
        "stream": on,
        "current_stream": lambda device: main,
        "cudart": lambda: runtime,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return log


def test_copies_come_after_the_step_and_before_what_holds_for_them(cuda: list[str]) -> None:
    encoded = encode({"a": torch.arange(5.0), "b": torch.ones(3, 4).T})
    room = ctypes.create_string_buffer(encoded.layout.total_bytes)
    copier = DeviceCopier(torch.device("cuda", 0))
    copier.follow()
    copier.copy(Batch(encoded.tensors, encoded.layout.specs, large=1 << 30), ctypes.addressof(room))
    copier.hold()
    copier.wait()
    assert cuda == ["side waits for main", "on side", "off", "main waits for side", "host waits for side"]
    assert room.raw[:20] == bytes(torch.arange(5.0).view(torch.uint8).tolist())


def test_a_piece_is_pinned_once_and_anew_when_it_has_grown(cuda: list[str]) -> None:
    memory = PinnedMemory()
    memory.pin(64, 1000)
    memory.pin(4096, 1000)
    memory.pin(64, 900)
    memory.pin(4096, 2000)
    memory.unpin()
    memory.unpin()
    assert cuda == [*("pin 64 1000 1", "pin 4096 1000 1", "unpin 4096", "pin 4096 2000 1", "unpin 64", "unpin 4096")]


def test_memory_that_cannot_be_pinned_is_warned_of(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    memory = PinnedMemory()
    with pytest.warns(RuntimeWarning, match=r"cannot pin 3 MB of the checkpoint file \(error 2\)"):
        memory.pin(64, 3_000_000)
    memory.pin(64, 3_000_000)
    memory.pin(4_000_000, 3_000_000)  # once
    memory.unpin()
    assert cuda == []


def test_a_step_waits_on_the_device_and_the_commit_on_the_host(
    cuda: list[str], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_device", lambda _: "cuda:0")
    monkeypatch.setattr(plan, "Batch", lambda tensors, specs, large: Batch(tensors, specs, large=1 << 60))
    model = torch.nn.BatchNorm1d(30_000)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = Checkpoint({"model": model, "optimizer": optimizer}, SlotFile(shm / "c"), overlap=True)
    model(torch.randn(4, 30_000)).sum().backward()
    checkpoint.save(1)
    checkpoint.wait()
    # Buffers and generators first, for which the next forward waits; then, in the thread, what the step waits for.
    start, end = (
        ["side waits for main", "on side", "off", "main waits for side"],
        ["on side", "off", "host waits for side"],
    )
    assert [*cuda[:4], cuda[4].split()[0], *cuda[5:]] == [*start, "pin", *end]
    cuda.clear()
    checkpoint.save(2)
    optimizer.step()
    checkpoint.wait()
    assert cuda.count("main waits for side") == 2 and cuda.count("host waits for side") == 1
    cuda.clear()
    checkpoint.save(3)  # larger by the optimizer's state: the file moves
    checkpoint.wait()
    assert {line.split()[0] for line in cuda[:2]} == {"unpin"}  # both slots that were used
    assert [*cuda[2:6], cuda[6].split()[0], *cuda[7:]] == [*start, "pin", *end]
    checkpoint.close()
    assert cuda[-1].startswith("unpin")
    assert [slot.completed_steps for slot in held(shm / "c") if slot.valid] == [1, 2, 3]
