"""The table of tensors in a slot's structure is written and read. If it is damaged, that is reported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import CorruptCheckpoint
from everstep.slots.tensor_table import TensorSpec, TensorView, pack_table, split

sizes = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
specs = st.builds(
    TensorSpec,
    name=st.text(),
    dtype=st.sampled_from(["float32", "bfloat16", "bool"]),
    shape=sizes,
    offset=st.integers(0, 1 << 50),
    nbytes=st.integers(0, 1 << 50),
    device=st.sampled_from(["cpu", "cuda"]),
    global_shape=st.none() | sizes,
    offsets=st.none() | sizes,
    replica=st.booleans(),
    group=st.none() | st.integers(0, 1 << 20),
)


@given(st.lists(specs, max_size=5), st.binary(max_size=50))
def test_a_packed_table_is_read_back(table: list[TensorSpec], tree: bytes) -> None:
    plain = [TensorView(number) for number in range(len(table))]
    assert split(pack_table(table) + tree) == (table, plain, tree)


def test_the_table_is_plain_json() -> None:
    spec = TensorSpec("model.w", "float32", (3, 4), 64, 48, "cpu", global_shape=(6, 4), offsets=(3, 0))
    packed = pack_table([spec])
    assert json.loads(packed[8 : 8 + int.from_bytes(packed[:8], "little")]) == {
        "tensors": [
            {
                "name": "model.w",
                "dtype": "float32",
                "shape": [3, 4],
                "offset": 64,
                "nbytes": 48,
                "device": "cpu",
                "global_shape": [6, 4],
                "offsets": [3, 0],
            }
        ]
    }


def test_fields_of_a_later_release_are_ignored() -> None:
    entry = {"name": "a", "dtype": "bool", "shape": [1], "offset": 0, "nbytes": 1, "device": "cpu", "color": "blue"}
    table = json.dumps({"tensors": [entry], "more": 1}).encode()
    assert split(len(table).to_bytes(8, "little") + table)[0] == [TensorSpec("a", "bool", (1,), 0, 1, "cpu")]


@pytest.mark.parametrize(
    "structure",
    [b"", b"\x01", bytes([9, 0, 0, 0, 0, 0, 0, 0]) + b"{}", (2).to_bytes(8, "little") + b"{}", b"\xff" * 40],
)
def test_a_damaged_table_is_refused(structure: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="a checkpoint's table of tensors cannot be read"):
        split(structure)


def test_the_module_needs_no_torch() -> None:
    code = "import everstep.slots.tensor_table, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
