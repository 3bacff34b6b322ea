"""The copier copies tensors into a slot, each to its offset."""

from __future__ import annotations

import ctypes

import pytest
import torch

from everstep.slots.tensor_table import TensorSpec
from everstep.training.copies import copier as module
from everstep.training.copies.copier import Batch, Copier
from everstep.training.state.codec import encode


def batch_of(*tensors: torch.Tensor, large: int = 1024) -> tuple[Batch, int]:
    """Return a batch of tensors, and its size in bytes."""
    encoded = encode({"all": list(tensors)})
    return Batch(encoded.tensors, encoded.layout.specs, large=large), encoded.layout.total_bytes


@pytest.mark.parametrize("large", [1, 1024, 1 << 30])
def test_every_kind_of_tensor_arrives(large: int) -> None:
    tensors = [
        torch.randn(1000),
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.randn(20, 30).T,
        torch.randn(4, 8, 8, 3).permute(0, 3, 1, 2),
        torch.randn(100)[::3],
        torch.randn(5, dtype=torch.complex64),
        torch.randn(6).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.ones(3, requires_grad=True),
    ]
    encoded = encode({"all": tensors})
    batch = Batch(encoded.tensors, encoded.layout.specs, large=large)
    for _ in range(2):  # a batch can be copied into several slots
        room = ctypes.create_string_buffer(b"\xff" * encoded.layout.total_bytes)
        Copier().copy(batch, ctypes.addressof(room))
        for tensor, spec in zip(tensors, encoded.layout.specs, strict=True):
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            assert room.raw[spec.offset : spec.offset + spec.nbytes] == bytes(raw.tolist())
            assert (
                room.raw[spec.offset + spec.nbytes : -(-(spec.offset + spec.nbytes) // 64) * 64].strip(b"\xff") == b""
            )


def test_neighbours_in_memory_are_moved_together() -> None:
    whole = torch.arange(1 << 12)  # the parts are views of this tensor, as in optimizers with flat buffers
    parts = list(whole.view(4, -1))
    batch, _ = batch_of(*parts, torch.zeros(1 << 10))
    assert [size for _, _, size in batch.moves] == [8 << 12, 4 << 10]
    assert [size for _, _, size in batch_of(parts[0], parts[2])[0].moves] == [8 << 10, 8 << 10]


def test_large_tensors_of_a_device_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)
    batch, total = batch_of(torch.arange(1000, dtype=torch.int16), torch.ones(7), large=1 << 30)
    room = ctypes.create_string_buffer(total)
    places, sources = batch.pairs(ctypes.addressof(room))
    assert [one.numel() for one in sources] == [1000, 1000, 28]
    assert [one.data_ptr() - ctypes.addressof(room) for one in places] == [0, 1000, 2048]


def test_places_are_remembered_until_the_file_moves() -> None:
    batch, total = batch_of(torch.ones(3))
    room = ctypes.create_string_buffer(total)
    first = batch.pairs(ctypes.addressof(room))[0][0]
    assert batch.pairs(ctypes.addressof(room))[0][0] is first
    batch.forget_slots()
    assert batch.pairs(ctypes.addressof(room))[0][0] is not first


def test_an_empty_batch_copies_nothing() -> None:
    spec = TensorSpec("a", "float32", (0,), 0, 0, "cpu")
    Copier().copy(Batch([torch.empty(0)], [spec], large=1), 0)
