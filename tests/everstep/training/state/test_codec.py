"""The types that the structure of a slot may contain, and the contents of its table."""

from __future__ import annotations

import collections
import ctypes
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.tensor_table import pack_table, split
from everstep.training.copies.copier import Batch, Copier
from everstep.training.state.codec import decode, encode, pack_tree
from everstep.training.state.layout import as_integers


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def packed(tree: bytes) -> bytes:
    """A structure without tensors, with a pickle that ``encode`` did not write."""
    return b"".join((pack_table([]), *pack_tree(pickle.dumps({}), tree)))


def test_a_structure_cannot_run_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"names builtins\.print"):
        decode(packed(pickle.dumps(Evil())), memoryview(b""), {})
    assert capsys.readouterr().out == ""


def test_a_structure_makes_up_no_bytes() -> None:
    good = encode({"a": bytearray(b"some bytes")})
    assert decode(good.structure, memoryview(b""), {}) == {"a": bytearray(b"some bytes")}
    many = b"\x80\x04cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."  # bytearray(2**31 - 1), in 31 bytes
    with pytest.raises(CorruptCheckpoint, match=r"names builtins\.bytearray"):
        decode(packed(many), memoryview(b""), {})


@pytest.mark.parametrize("value", [numpy.float32(0.1), numpy.float64(0.1), numpy.int8(-3), numpy.bool_(True)])
def test_a_number_of_numpy_keeps_its_type(value: Any) -> None:
    good = encode({"mean": value})
    again = decode(good.structure, memoryview(b""), {})["mean"]
    assert (type(again), again) == (type(value), value)


@pytest.mark.parametrize(("name", "data"), [("|O", b"12345678"), ("<f4", b"12345"), ("<U1", b"1234")])
def test_a_number_of_another_kind_is_refused(name: str, data: bytes) -> None:
    class Lie(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("number", name, data) if obj == "lie" else None

    buffer = io.BytesIO()
    Lie(buffer, protocol=5).dump({"mean": "lie"})
    with pytest.raises(CorruptCheckpoint, match="as the type of a number"):
        decode(packed(buffer.getvalue()), memoryview(b""), {})


def test_a_reference_to_a_type_gives_types_only(tmp_path: Path) -> None:
    path = str(tmp_path / "written").encode()
    reference = b"\x8c\x05dtype\x8c\x09from_file\x86Q"  # ("dtype", "from_file"): torch has many functions
    call = (
        reference + b"(\x8c" + bytes([len(path)]) + path + b"\x88K\x08tR."
    )  # (path, True, 8): this would write and map a file
    with pytest.raises(CorruptCheckpoint, match="'from_file' as the type"):
        decode(packed(b"\x80\x04" + call), memoryview(b""), {})
    assert not (tmp_path / "written").exists()


def test_a_tensor_of_no_bytes_has_no_elements() -> None:
    good = encode({"a": torch.ones(0, 3)})
    tree = good.structure[len(good.layout.table) :]
    assert decode(good.structure, memoryview(b""), {})["a"].shape == (0, 3)
    lie = pack_table([good.layout.specs[0]._replace(shape=(1000, 3))])
    with pytest.raises(RuntimeError, match="invalid for input of size 0"):
        decode(lie + tree, memoryview(b""), {})


def test_the_table_names_each_range_of_memory_by_the_path_of_its_first_tensor() -> None:
    one = torch.ones(2)
    tied = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(3, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    clashing = {"x.y": one, "x": {"y": torch.ones(3)}, "again": [one, one], 1: torch.ones(1), "1": torch.ones(1)}
    deep = {"deque": collections.deque([torch.ones(4)]), "rng": {"key": (1, numpy.arange(2))}}
    encoded = encode({"model": tied.state_dict(), "clashing": clashing, "deep": deep})
    assert [spec.name for spec in split(encoded.structure).specs] == [
        *("model.a.weight", "clashing.x.y", "clashing.x.y.2", "clashing.1", "clashing.1.2"),
        *("deep.deque.0", "deep.rng.key.1"),
    ]


def test_the_table_is_made_anew_only_when_it_no_longer_fits() -> None:
    first = encode({"a": torch.ones(2), "b": torch.ones(2), "n": 1})
    assert encode({"a": torch.zeros(2), "b": torch.zeros(2), "n": 2}, first.layout).layout is first.layout
    renamed = encode({"a": torch.ones(2), "c": torch.ones(2), "n": 1}, first.layout)
    assert [spec.name for spec in split(renamed.structure)[0]] == ["a", "c"]
    grown = encode({"a": torch.ones(2), "b": torch.ones(3), "n": 1}, first.layout)
    assert [spec.shape for spec in split(grown.structure)[0]] == [(2,), (3,)]


def round_trip(tree: dict[str, Any]) -> Any:
    encoded = encode(tree)
    memory = memoryview(bytearray(encoded.layout.total_bytes))
    batch = Batch(encoded.tensors, encoded.layout.specs, large=1 << 60)
    if memory:
        Copier().copy(batch, ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    return decode(encoded.structure, memory, {})


STRIDED = {
    "transposed": torch.arange(12.0).view(3, 4).T,
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one by one, channels_last": torch.randn(3, 4, 1, 1).to(memory_format=torch.channels_last),
    "sliced": torch.arange(40.0).view(5, 8)[:, 2:5],
    "expanded": torch.arange(3.0).expand(4, 3),
    "every other": torch.arange(20, dtype=torch.int16)[::2],
    "diagonal": torch.arange(9.0).view(3, 3).diagonal(),
    "complex": torch.randn(3, 4, dtype=torch.complex128).T,
    "float8": torch.randn(4, 6).to(torch.float8_e5m2).T,
    "no elements": torch.empty(0, 3).T,
    "one bit": torch.zeros(4, 6, dtype=torch.uint8).view(getattr(torch, "uint1")).T,  # noqa: B009 — the stubs of torch lack it
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_come_back(name: str) -> None:
    tensor = STRIDED[name]
    again = round_trip({"tensor": tensor})["tensor"]
    assert (again.dtype, again.shape, again.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert as_integers(again).tolist() == as_integers(tensor).tolist()


def test_tensors_that_share_memory_share_it_again() -> None:
    whole = torch.arange(24.0)
    tree = {
        "views": [whole[:8].view(2, 4), whole[4:20], whole],
        "turned": [whole.view(4, 6).T, whole.view(4, 6)[:, 1]],
        "bits": whole[:2].view(torch.int32),
        "alone": torch.ones(3),
    }
    encoded = encode(tree)
    assert encoded.layout.total_bytes == 128 + 64, "the shared memory is saved once"
    again = round_trip(tree)
    again["views"][2][:] = torch.arange(100.0, 124.0)
    assert again["views"][0].tolist() == [[100, 101, 102, 103], [104, 105, 106, 107]]
    assert again["views"][1][0] == 104
    assert again["turned"][0][1].tolist() == [101, 107, 113, 119] == again["turned"][1].tolist()
    assert again["bits"].view(torch.float32).tolist() == [100, 101]
    assert again["alone"].tolist() == [1, 1, 1]


def test_halves_of_a_buffer_that_is_not_saved_itself_share_memory_again() -> None:
    whole = torch.arange(12.0)
    again = round_trip({"left": whole[:8], "right": whole[4:]})
    again["left"][7] = -1
    assert again["right"].tolist() == [4, 5, 6, -1, 8, 9, 10, 11]


def test_a_layout_is_made_anew_if_tensors_begin_to_share_memory() -> None:
    one, other = torch.ones(4), torch.ones(4)
    first = encode({"a": one, "b": other})
    assert encode({"a": one, "b": other}, first.layout).layout is first.layout
    assert len(encode({"a": one, "b": one}, first.layout).layout.specs) == 1


class Named(torch.Tensor):
    """A tensor with attributes."""


def test_a_subclass_with_attributes_comes_back() -> None:
    tensor = torch.arange(3.0).as_subclass(Named)
    tensor.unit = ["m", 2]  # type: ignore[attr-defined]
    again = round_trip({"tensor": tensor})["tensor"]
    assert (type(again), again.unit, again.tolist()) == (Named, ["m", 2], [0, 1, 2])


def test_a_class_that_no_later_process_can_find_is_refused() -> None:
    class Local(torch.Tensor):
        pass

    with pytest.raises(CheckpointError, match=r"cannot find: define the class at the top level"):
        encode({"tensor": torch.ones(1).as_subclass(Local)})


def test_a_class_that_the_script_has_not_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode({"tensor": torch.ones(1).as_subclass(Named)})
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.raises(CheckpointError, match=r"has not imported: import it before run.steps"):
        decode(encoded.structure, memoryview(bytearray(64)), {})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
def test_sparse_tensors_come_back(layout: torch.layout) -> None:
    dense = torch.tensor([[0.0, 2, 0, 0], [0, 0, 0, 3]])
    blocks = {"blocksize": (1, 2)} if layout is torch.sparse_bsr else {}
    again = round_trip({"tensor": dense.to_sparse(layout=layout, **blocks)})["tensor"]  # type: ignore[call-overload]
    assert (again.layout, again.to_dense().tolist()) == (layout, dense.tolist())


@pytest.mark.parametrize(
    "array",
    [
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        numpy.arange(4, dtype=">f4"),
        numpy.arange(3, dtype=numpy.longdouble) / 3,
        numpy.array(["one", "three"]),
        numpy.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        numpy.array(["2020-01-01"], dtype="M8[D]"),
        numpy.float64(3) * numpy.ones(()),
    ],
    ids=str,
)
def test_arrays_come_back_with_their_type(array: Any) -> None:
    again = round_trip({"array": array})["array"]
    assert (again.dtype, again.shape, again.tolist()) == (array.dtype, array.shape, array.tolist())
    assert again.flags.f_contiguous == numpy.asarray(array).flags.f_contiguous
