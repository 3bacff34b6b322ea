"""The layout of a safetensors file, from the table of a slot's structure. No torch, and no pickle is read.

The file's tensors are in the order of the payload, so that one pass over the payload writes it:

* chunks of whole tensors under their name, with their offsets in the metadata
  that torch's distributed checkpoint reads (``DCP_SHARDING_INFO``): the files of
  all ranks together are a sharded checkpoint;
* what is a rank's own, or a copy of a chunk that another rank saves, under
  ``rank-<r>.<name>``; in a job without tensor and pipeline parallelism the
  rank's own tensors of rank 0 keep their plain names;
* the bytes between the payload's tensors, and the structure, as bytes under
  ``everstep.padding.rank-<r>`` and ``everstep.structure.rank-<r>``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.model.topology import Topology
from everstep.shards.manifest import Part, Piece, TensorEntry, gaps
from everstep.slots.format import ALIGNMENT, U64, SlotHeader, aligned
from everstep.slots.tensor_table import split

_STORED = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""Names that every release of safetensors and torch's reader know, with the bytes of an element."""
_WIDTHS = {"complex128": 16, "complex64": 8, "complex32": 4, "bits16": 2}
"""Type that safetensors does not have → bytes of an element, for types of more than one byte."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The positions of all parts in the file."""

    head: bytes
    """The first bytes of the file."""
    tensors: tuple[Part, ...]
    fillers: tuple[tuple[int, int], ...]
    """(place in the file, bytes) of zeros that keep tensors at multiples of their element's size."""
    padding: Piece
    structure: Piece
    bytes: int
    """Size of the file."""


def table_of(structure: bytes) -> tuple[TensorEntry, ...]:
    """The table of a slot's structure, in the order of the payload.

    Raises:
        CorruptCheckpoint: it cannot be read.
    """
    specs, _ = split(structure)
    try:
        entries = [TensorEntry.model_validate(spec._asdict()) for spec in specs]
    except ValueError as error:
        raise CorruptCheckpoint(f"the table of tensors of a state makes no sense: {error}") from error
    return tuple(sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)))


def layout_of(entries: Iterable[TensorEntry], header: SlotHeader, *, job: str, rank: int, topology: str) -> FileLayout:
    """Plan the file of a rank.

    Args:
        entries: From ``table_of``.
        header: The header of the slot.
        job: Name of the job, for people who see the file.
        rank: The rank.
        topology: Text of the job's topology, as in ``EVERSTEP_TOPOLOGY``; empty: not known.

    Raises:
        CorruptCheckpoint: the table does not fit the slot.
        CheckpointError: a tensor's type is not known.
        TopologyError: ``topology`` cannot be read.
    """
    entries = tuple(entries)
    spare = gaps(entries, aligned(header.tensor_bytes))
    plain = rank == 0 and _one_kind(topology)
    relative, fillers, parts, taken = 0, [], [], set[str]()
    for entry in entries:
        stored, width, step = _stored(entry)
        if lacking := -relative % step:
            fillers.append((relative, lacking))
            relative += lacking
        key = _key(entry, rank, plain)
        while key in taken:  # only when a state's own names look like ours
            key += "~"
        taken.add(key)
        fields = entry.model_dump() | {"key": key, "stored": stored, "width": width, "at": relative}
        parts.append(Part.model_validate(fields))
        relative += entry.nbytes
    padding = Piece(at=relative, nbytes=sum(size for _, size in spare))
    structure = Piece(at=relative + padding.nbytes, nbytes=header.structure_bytes)

    pieces = [(part.key, part.stored, part.stored_shape(), part.at, part.stored_offsets()) for part in parts]
    ours = [(f"everstep.filler.rank-{rank}.{number}", begin, size) for number, (begin, size) in enumerate(fillers)]
    ours.append((f"everstep.padding.rank-{rank}", padding.at, padding.nbytes))
    ours.append((f"everstep.structure.rank-{rank}", structure.at, structure.nbytes))
    pieces += [(key, "U8", [size], begin, [0]) for key, begin, size in ours]
    ends = [part.at + part.nbytes for part in parts] + [begin + size for _, begin, size in ours]
    tensors = {
        key: {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
        for (key, stored, shape, begin, _), end in zip(pieces, ends, strict=True)
    }
    offsets = {key: {"saved_offsets": at} for key, _, _, _, at in pieces}
    about = {
        "job": job,
        "rank": rank,
        "step": header.completed_steps,
        "generation": header.generation,
        "topology": topology,
    }
    metadata = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":")),
        "everstep": json.dumps(about),
    }
    head = _head({"__metadata__": metadata, **tensors})
    return FileLayout(
        head,
        tuple(part.model_copy(update={"at": len(head) + part.at}) for part in parts),
        tuple((len(head) + begin, size) for begin, size in fillers),
        Piece(at=len(head) + padding.at, nbytes=padding.nbytes),
        Piece(at=len(head) + structure.at, nbytes=structure.nbytes),
        len(head) + structure.at + structure.nbytes,
    )


def whole_key(entry: TensorEntry) -> str:
    """The name under which the chunks of a whole tensor are saved."""
    # The group of rank 0 needs no prefix: it is the only one, or names what the others have copies of.
    return f"group-{entry.group}.{entry.name}" if entry.group else entry.name


def _key(entry: TensorEntry, rank: int, plain: bool) -> str:
    if entry.global_shape is not None and not entry.replica:
        return whole_key(entry)
    return entry.name if plain and entry.global_shape is None else f"rank-{rank}.{entry.name}"


def _one_kind(topology: str) -> bool:
    """Whether there is data parallelism only, so that rank 0 has all of a model that is not sharded."""
    if not topology:
        return False
    sizes = Topology.parse(topology)
    return sizes.dp == sizes.world_size


def _stored(entry: TensorEntry) -> tuple[str, int, int]:
    """(type in the file, width of an element that is stored as bytes, what its place must be a multiple of)."""
    known = _STORED.get(entry.dtype)
    width = 1 if known else _WIDTHS.get(entry.dtype, 1)
    nbytes = math.prod(entry.shape) * (known[1] if known else width)
    if nbytes != entry.nbytes:
        raise CheckpointError(
            f"the tensor {entry.name} of {entry.dtype} {list(entry.shape)} has {entry.nbytes} bytes, {nbytes} were "
            "expected: this everstep cannot write it to disk"
        )
    return (known[0], 1, known[1]) if known else ("U8", width, 1)


def _head(fields: dict[str, Any]) -> bytes:
    """Length and header as safetensors has them, with spaces at the end: tensors begin at a multiple of 64."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (aligned(U64.size + len(text), ALIGNMENT) - U64.size - len(text))
    return U64.pack(len(text)) + text
