"""Two threads copy tensors from a slot into private memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

import pytest
import torch

from everstep.errors import CorruptCheckpoint
from everstep.slots.tensor_table import TensorSpec
from everstep.training.copies import restore_copy as module
from everstep.training.copies.restore_copy import RestoreCopy


def spec(offset: int, nbytes: int) -> TensorSpec:
    return TensorSpec("a", "uint8", (nbytes,), offset, nbytes, "cpu")


def consume(ends: Iterable[int]) -> None:
    """Act as a verification that reads nothing."""
    for _ in ends:
        pass


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)


def test_only_the_requested_tensors_are_copied() -> None:
    source = bytearray(index % 251 for index in range(100_000))
    copy = RestoreCopy(memoryview(source), consume)
    tensors = [copy.tensor(spec(*place)) for place in ((5, 3000), (50_000, 1), (70_000, 30_000), (7, 0))]
    elsewhere = ctypes.create_string_buffer(2500)
    copy.fill(spec(20_000, 2500), ctypes.addressof(elsewhere))
    assert not any(one.any() for one in tensors) and not any(elsewhere.raw)
    copy.start()
    copy.finish()
    assert [bytes(one.tolist()) for one in tensors] == [
        *(source[5:3005], source[50_000:50_001], source[70_000:100_000], b"")
    ]
    assert elsewhere.raw == source[20_000:22_500]
    tensors[0][0] = 0
    assert source[5] == 5


def test_a_copy_is_not_finished_before_it_is_verified() -> None:
    go = threading.Event()

    def verify(ends: Iterable[int]) -> None:
        assert go.wait(30)
        raise CorruptCheckpoint("bits were flipped")

    copy = RestoreCopy(memoryview(bytearray(5000)), verify)
    copy.tensor(spec(0, 5000))
    copy.start()
    errors: list[BaseException] = []

    def finish() -> None:
        try:
            copy.finish()
        except CorruptCheckpoint as error:
            errors.append(error)

    finishing = threading.Thread(target=finish)
    finishing.start()
    finishing.join(0.1)
    assert finishing.is_alive()
    go.set()
    finishing.join(30)
    assert [str(error) for error in errors] == ["bits were flipped"]


def test_a_slot_without_tensors() -> None:
    copy = RestoreCopy(memoryview(bytearray()), consume)
    copy.start()
    copy.finish()


def test_each_piece_is_copied_before_it_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(module, "populate", lambda *_: go.wait(30))
    monkeypatch.setattr(module, "LEAST_RUN", 1)
    source = bytearray(index % 251 for index in range(100_000))
    ends: list[int] = []
    made: list[torch.Tensor] = []

    def verify(given: Iterable[int]) -> None:
        for end in given:  # the other thread waits for its pages meanwhile
            assert bytes(made[0][:end].tolist()) == source[:end]
            ends.append(end)
            if end == 50_000:
                go.set()

    copy = RestoreCopy(memoryview(source), verify)
    made.append(copy.tensor(spec(0, 100_000)))
    copy.start()
    copy.finish()
    assert ends[:50] == list(range(1000, 51_000, 1000))
    assert bytes(made[0].tolist()) == source


def test_an_error_of_the_second_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise MemoryError("no pages")

    monkeypatch.setattr(module, "populate", broken)
    monkeypatch.setattr(module, "LEAST_RUN", 1)
    copy = RestoreCopy(memoryview(bytearray(5000)), consume)
    copy.tensor(spec(0, 5000))
    copy.start()
    with pytest.raises(MemoryError, match="no pages"):
        copy.finish()


def test_adjacent_pages_are_populated_together() -> None:
    memory, at = 1 << 30, (1 << 30) + 500_000
    here = [(0, memory, 100_000), (100_032, memory + 100_032, 100_000), (300_000, memory + 300_000, 100)]
    elsewhere = [(500_000, at + 7, 100_000), (600_000, at + 100_007, 50)]
    assert list(module._runs([*here, *elsewhere], memory)) == [(0, 200_032, True), (500_000, 600_050, False)]
    assert list(module._runs([], memory)) == []
