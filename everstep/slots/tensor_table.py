"""Packs and splits the structure that follows the tensors in a slot: a table of the tensors, and the tree of the state.

Layout::

    length of the table u64, little endian · table, JSON, UTF-8 · tree

The table is ``{"tensors": [{"name", "dtype", "shape", "offset", "nbytes", "device", …}]}``, with one object for each
tensor in the order of their numbers. The tree is a pickle of containers, numbers and strings, in which a tensor is
represented by its number. Only ``everstep/training/codec.py`` reads the tree, with an unpickler that runs no code. This
module does not import torch, since agents use it too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from everstep.errors import CorruptCheckpoint

_LENGTH = struct.Struct("<Q")


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


def pack_table(specs: Sequence[TensorSpec]) -> bytes:
    """The first part of a structure: the length of the table, and the table."""
    table = json.dumps({"tensors": [_entry(spec) for spec in specs]}, separators=(",", ":")).encode()
    return _LENGTH.pack(len(table)) + table


def split(structure: bytes | memoryview) -> tuple[list[TensorSpec], bytes]:
    """The table and the tree of a structure; fields that a later release added are ignored.

    Raises:
        CorruptCheckpoint: the structure has another form.
    """
    try:
        (length,) = _LENGTH.unpack_from(structure)
        raw = bytes(structure[_LENGTH.size : _LENGTH.size + length])
        if len(raw) < length:
            raise ValueError(f"{len(raw)} of {length} bytes are there")
        specs = [_spec(entry) for entry in json.loads(raw)["tensors"]]
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"a checkpoint's table of tensors cannot be read: {error}") from error
    return specs, bytes(structure[_LENGTH.size + length :])


def _entry(spec: TensorSpec) -> dict[str, Any]:
    """The fields of a tensor in the table; defaults are left out."""
    return {field: value for field, value in spec._asdict().items() if value is not None and value is not False}


def _spec(entry: dict[str, Any]) -> TensorSpec:
    fields = {field: entry[field] for field in TensorSpec._fields if field in entry}
    for field in ("shape", "global_shape", "offsets"):
        if field in fields:
            fields[field] = tuple(int(number) for number in fields[field])
    return TensorSpec(**fields)
