"""Memory that is filled from a slot by two threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

import pytest

from everstep.errors import CorruptCheckpoint
from everstep.structure import TensorSpec
from everstep.training import arena as module
from everstep.training.arena import Arena


def spec(offset: int, nbytes: int) -> TensorSpec:
    return TensorSpec("a", "uint8", (nbytes,), offset, nbytes, "cpu")


def consume(ends: Iterable[int]) -> None:
    """A verification that reads nothing."""
    for _ in ends:
        pass


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)


def test_what_was_asked_for_is_there_and_nothing_else() -> None:
    source = bytearray(index % 251 for index in range(100_000))
    arena = Arena(memoryview(source), consume)
    tensors = [arena.tensor(spec(*place)) for place in ((5, 3000), (50_000, 1), (70_000, 30_000), (7, 0))]
    elsewhere = ctypes.create_string_buffer(2500)
    arena.fill(spec(20_000, 2500), ctypes.addressof(elsewhere))
    assert not any(one.any() for one in tensors) and not any(elsewhere.raw)
    arena.start()
    arena.finish()
    assert [bytes(one.tolist()) for one in tensors] == [
        *(source[5:3005], source[50_000:50_001], source[70_000:100_000], b"")
    ]
    assert elsewhere.raw == source[20_000:22_500]
    tensors[0][0] = 0
    assert source[5] == 5


def test_it_is_not_finished_before_it_is_verified() -> None:
    go = threading.Event()

    def verify(ends: Iterable[int]) -> None:
        assert go.wait(30)
        raise CorruptCheckpoint("bits were flipped")

    arena = Arena(memoryview(bytearray(5000)), verify)
    arena.tensor(spec(0, 5000))
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
    arena = Arena(memoryview(bytearray()), consume)
    arena.start()
    arena.finish()
