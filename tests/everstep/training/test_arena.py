"""Memory that is filled from a slot by two threads."""

from __future__ import annotations

import threading

import pytest

from everstep.errors import CorruptCheckpoint
from everstep.structure import TensorSpec
from everstep.training import arena as module
from everstep.training.arena import Arena


def spec(offset: int, nbytes: int) -> TensorSpec:
    return TensorSpec("a", "uint8", (nbytes,), offset, nbytes, "cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)


def test_what_was_asked_for_is_there_and_nothing_else() -> None:
    source = bytearray(index % 251 for index in range(100_000))
    arena = Arena(memoryview(source), lambda: None)
    memory = arena.place(spec(5, 3000))
    arena.place(spec(50_000, 1))
    arena.place(spec(70_000, 30_000))
    assert not any(memory)
    arena.start()
    arena.finish()
    expected = bytearray(100_000)
    for start, size in ((5, 3000), (50_000, 1), (70_000, 30_000)):
        expected[start : start + size] = source[start : start + size]
    assert bytes(memory) == expected
    memory[5] = 0
    assert source[5] == 5


def test_it_is_not_finished_before_it_is_verified() -> None:
    go = threading.Event()

    def verify() -> None:
        assert go.wait(30)
        raise CorruptCheckpoint("bits were flipped")

    arena = Arena(memoryview(bytearray(5000)), verify)
    arena.place(spec(0, 5000))
    arena.start()
    errors: list[BaseException] = []

    def finish() -> None:
        try:
            arena.finish()
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
    arena = Arena(memoryview(bytearray()), lambda: None)
    arena.start()
    arena.finish()
