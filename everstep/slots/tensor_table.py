"""Packs and splits the structure that follows the tensors in a slot: a table of the tensors, and the tree of the state.

Layout::

    length of the table u64, little endian · table, JSON, UTF-8 · tree

The table is ``{"tensors": [{"name", "dtype", "shape", "offset", "nbytes", "device", …}], "views": […]}``. ``tensors``
has one object for each saved range of memory, and ``views`` says for each tensor of the state which range it shows, and
how. ``views`` is left out if each tensor has a range of its own and is contiguous. The tree is a pickle of containers,
numbers and strings, in which a tensor is represented by its number. Only ``everstep/training/state/codec.py`` reads the
tree, with an unpickler that runs no code. This module does not import torch, since agents use it too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from everstep.errors import CorruptCheckpoint

_LENGTH = struct.Struct("<Q")


class TensorView(NamedTuple):
    """How a tensor of the state shows the bytes of the table."""

    tensor: int
    """Index of the range in the table."""
    dtype: str = ""
    """Name of the tensor's type in torch; empty: the tensor is the range itself, contiguous, and has its shape."""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    """Strides of the tensor, in elements."""
    offset: int | None = None
    """Bytes from the beginning of the range to the tensor's first element, if the tensor shares memory with others or
    with itself. None: the range has the tensor's elements in the order of its indices."""


class TensorSpec(NamedTuple):
    """The position of a tensor's bytes and their meaning."""

    name: str
    """The path in the state, keys joined by dots, e.g. ``model.blocks.0.weight``; unique in its table."""
    dtype: str
    """Name of the type in torch, e.g. ``bfloat16``."""
    shape: tuple[int, ...]
    """Shape of the saved tensor; for a DTensor, the shape of its local shard."""
    offset: int
    """Bytes from the beginning of the tensors."""
    nbytes: int
    device: str
    """Device type, e.g. ``cpu`` or ``cuda``."""
    global_shape: tuple[int, ...] | None = None
    """Shape of the complete DTensor of which this is a chunk; None: it is not a chunk."""
    offsets: tuple[int, ...] | None = None
    """Index in the complete tensor at which the chunk begins, one number for each dimension."""
    replica: bool = False
    """Another rank saves the same chunk under this name."""
    group: int | None = None
    """Lowest rank of the chunk's mesh, which distinguishes meshes with equal names; None: the mesh has all ranks."""


class Structure(NamedTuple):
    """The parts of a structure."""

    specs: list[TensorSpec]
    views: list[TensorView]
    """For the number of each tensor, the range that it shows."""
    tree: bytes


def pack_table(specs: Sequence[TensorSpec], views: Sequence[TensorView] = ()) -> bytes:
    """The first part of a structure: the length of the table, and the table.

    Args:
        specs: The ranges of memory.
        views: The tensors of the state, by number; empty: each range is one tensor.
    """
    fields: dict[str, Any] = {"tensors": [_entry(spec) for spec in specs]}
    if list(views) != _plain(len(specs)) and views:
        fields["views"] = views
    table = json.dumps(fields, separators=(",", ":")).encode()
    return _LENGTH.pack(len(table)) + table


def split(structure: bytes | memoryview) -> Structure:
    """The parts of a structure; fields that a later release added are ignored.

    Raises:
        CorruptCheckpoint: the structure has another form.
    """
    try:
        (length,) = _LENGTH.unpack_from(structure)
        raw = bytes(structure[_LENGTH.size : _LENGTH.size + length])
        if len(raw) < length:
            raise ValueError(f"{len(raw)} of {length} bytes are there")
        fields = json.loads(raw)
        specs = [_spec(entry) for entry in fields["tensors"]]
        views = [_view(entry) for entry in fields["views"]] if "views" in fields else _plain(len(specs))
        if any(not 0 <= view.tensor < len(specs) for view in views):
            raise ValueError("a tensor shows a range that does not exist")
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"a checkpoint's table of tensors cannot be read: {error}") from error
    return Structure(specs, views, bytes(structure[_LENGTH.size + length :]))


def _plain(count: int) -> list[TensorView]:
    """The views of a state in which each tensor has a range of its own."""
    return [TensorView(number) for number in range(count)]


def _view(entry: list[Any]) -> TensorView:
    tensor, dtype, shape, strides, offset = entry
    return TensorView(int(tensor), str(dtype), (*map(int, shape),), (*map(int, strides),), offset)


def _entry(spec: TensorSpec) -> dict[str, Any]:
    """The fields of a tensor in the table; defaults are left out."""
    return {field: value for field, value in spec._asdict().items() if value is not None and value is not False}


def _spec(entry: dict[str, Any]) -> TensorSpec:
    fields = {field: entry[field] for field in TensorSpec._fields if field in entry}
    for field in ("shape", "global_shape", "offsets"):
        if field in fields:
            fields[field] = tuple(int(number) for number in fields[field])
    return TensorSpec(**fields)
