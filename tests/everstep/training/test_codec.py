"""The types that the structure of a slot may contain, and the contents of its table."""

from __future__ import annotations

import collections
import io
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from everstep.errors import CorruptCheckpoint
from everstep.slots.tensor_table import pack_table, split
from everstep.training.codec import decode, encode


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_a_structure_cannot_run_code(capsys: pytest.CaptureFixture[str]) -> None:
    good = encode({"a": 1})
    with pytest.raises(CorruptCheckpoint, match=r"names builtins\.print"):
        decode(good.layout.table + pickle.dumps(Evil()), memoryview(b""), {})
    assert capsys.readouterr().out == ""


def test_a_structure_makes_up_no_bytes() -> None:
    good = encode({"a": bytearray(b"some bytes")})
    assert decode(good.structure, memoryview(b""), {}) == {"a": bytearray(b"some bytes")}
    many = b"\x80\x04cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."  # bytearray(2**31 - 1), in 31 bytes
    with pytest.raises(CorruptCheckpoint, match=r"names builtins\.bytearray"):
        decode(pack_table([]) + many, memoryview(b""), {})


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
        decode(pack_table([]) + buffer.getvalue(), memoryview(b""), {})


def test_a_reference_to_a_type_gives_types_only(tmp_path: Path) -> None:
    path = str(tmp_path / "written").encode()
    reference = b"\x8c\x05dtype\x8c\x09from_file\x86Q"  # ("dtype", "from_file"): torch has many functions
    call = (
        reference + b"(\x8c" + bytes([len(path)]) + path + b"\x88K\x08tR."
    )  # (path, True, 8): this would write and map a file
    with pytest.raises(CorruptCheckpoint, match="'from_file' as the type"):
        decode(pack_table([]) + b"\x80\x04" + call, memoryview(b""), {})
    assert not (tmp_path / "written").exists()


def test_a_tensor_of_no_bytes_has_no_elements() -> None:
    good = encode({"a": torch.ones(0, 3)})
    tree = good.structure[len(good.layout.table) :]
    assert decode(good.structure, memoryview(b""), {})["a"].shape == (0, 3)
    lie = pack_table([good.layout.specs[0]._replace(shape=(1000, 3))])
    with pytest.raises(RuntimeError, match="invalid for input of size 0"):
        decode(lie + tree, memoryview(b""), {})


def test_the_table_names_every_tensor_by_its_path(shm: Path) -> None:
    one = torch.ones(2)
    tied = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(3, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    clashing = {"x.y": one, "x": {"y": torch.ones(3)}, "again": [one, one], 1: torch.ones(1), "1": torch.ones(1)}
    deep = {"deque": collections.deque([torch.ones(4)]), "rng": {"key": (1, numpy.arange(2))}}
    encoded = encode({"model": tied.state_dict(), "clashing": clashing, "deep": deep})
    assert [spec.name for spec in split(encoded.structure)[0]] == [
        *("model.a.weight", "model.b.weight"),
        *("clashing.x.y", "clashing.x.y.2", "clashing.x.y.3", "clashing.x.y.4", "clashing.1", "clashing.1.2"),
        *("deep.deque.0", "deep.rng.key.1"),
    ]


def test_the_table_is_made_anew_only_when_it_no_longer_fits() -> None:
    first = encode({"a": torch.ones(2), "b": torch.ones(2), "n": 1})
    assert encode({"a": torch.zeros(2), "b": torch.zeros(2), "n": 2}, first.layout).layout is first.layout
    renamed = encode({"a": torch.ones(2), "c": torch.ones(2), "n": 1}, first.layout)
    assert [spec.name for spec in split(renamed.structure)[0]] == ["a", "c"]
    grown = encode({"a": torch.ones(2), "b": torch.ones(3), "n": 1}, first.layout)
    assert [spec.shape for spec in split(grown.structure)[0]] == [(2,), (3,)]
