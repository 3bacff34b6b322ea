"""The structure behind the tensors in a slot: a table of them, and the tree that they belong to.

Layout::

    length of the table u64, little endian · table, JSON, UTF-8 · tree

The table is ``{"tensors": [{"name", "dtype", "shape", "offset", "nbytes", "device", …}]}``, one object for each tensor
in the order of its number. The tree is a pickle of containers, numbers and strings in which tensors are numbered
references; only ``everstep/training/codec.py`` reads it, and with an unpickler that runs no code. No torch here: agents
write checkpoints to disk tensor by tensor.
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
    """Shape of the saved tensor; of a DTensor its local shard's."""
    offset: int
    """Bytes from the beginning of the tensors."""
    nbytes: int
    device: str
    """Device type, e.g. ``cpu`` or ``cuda``."""
    global_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor of which this is a chunk; None: it is no chunk of a DTensor."""
    offsets: tuple[int, ...] | None = None
    """Index in the whole at which the chunk begins, one number for each dimension."""
    replica: bool = False
    """Another rank saves the same chunk under this name."""
    group: int | None = None
    """Lowest rank of the chunk's mesh when it leaves ranks of the job out: other meshes may use the same name."""


def pack_table(specs: Sequence[TensorSpec]) -> bytes:
    """The table with its length before it; the tree follows it in a structure."""
    table = json.dumps({"tensors": [_entry(spec) for spec in specs]}, separators=(",", ":")).encode()
    return _LENGTH.pack(len(table)) + table


def split(structure: bytes | memoryview) -> tuple[list[TensorSpec], bytes]:
    """The table and the tree of a structure; fields that a later release added are ignored.

    Raises:
        CorruptCheckpoint: it is not made like that.
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
    """The fields in the table; defaults are left out."""
    return {field: value for field, value in spec._asdict().items() if value is not None and value is not False}


def _spec(entry: dict[str, Any]) -> TensorSpec:
    known = {field: entry[field] for field in TensorSpec._fields if field in entry}
    for field in ("shape", "global_shape", "offsets"):
        if field in known:
            known[field] = tuple(int(number) for number in known[field])
    return TensorSpec(**known)
