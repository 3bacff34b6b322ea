"""Plans the layout of a safetensors file from the table of a slot's structure, without torch and without pickles.

The file's tensors are in the order of the slot's payload, so that one pass over the payload writes the file:

* A chunk of a tensor that is spread over ranks has the tensor's name. Its offsets are in the metadata that torch's
  distributed checkpoint reads (``DCP_SHARDING_INFO``), so the files of all ranks together are a sharded checkpoint.
* A tensor of this rank alone, and a copy of a chunk that another rank saves, is named ``rank-<r>.<name>``. In a job
  with data parallelism only, the tensors of rank 0 keep their plain names.
* The bytes between the payload's tensors, and the structure, are named ``everstep.padding.rank-<r>`` and
  ``everstep.structure.rank-<r>``.
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
"""Type in torch → its name in safetensors, and bytes of an element. Every release of safetensors, and torch's reader,
know these names."""
_WIDTHS = {"complex128": 16, "complex64": 8, "complex32": 4, "bits16": 2}
"""Type that safetensors does not have → bytes of an element; types of one byte are left out."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The positions of all parts in the file."""

    head: bytes
    """The first bytes of the file."""
    tensors: tuple[Part, ...]
    fillers: tuple[tuple[int, int], ...]
    """Position and number of zero bytes that align the next tensor to the size of its elements."""
    padding: Piece
    structure: Piece
    bytes: int
    """Size of the file."""


def table_of(structure: bytes) -> tuple[TensorEntry, ...]:
    """The table of a slot's structure, in the order of the payload.

    Raises:
        CorruptCheckpoint: it cannot be read.
    """
    specs = split(structure).specs
    try:
        entries = [TensorEntry.model_validate(spec._asdict()) for spec in specs]
    except ValueError as error:
        raise CorruptCheckpoint(f"the table of tensors of a state makes no sense: {error}") from error
    return tuple(sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)))


def layout_of(entries: Iterable[TensorEntry], header: SlotHeader, *, job: str, rank: int, topology: str) -> FileLayout:
    """Plan the file of a rank.

    Args:
        entries: The table, from ``table_of``.
        header: The header of the slot.
        job: Name of the job, for people who read the file.
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
        stored, width, alignment = _stored(entry)
        if lacking := -relative % alignment:
            fillers.append((relative, lacking))
            relative += lacking
        key = _key(entry, rank, plain)
        while key in taken:  # only if the state's own names look like those above
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
    """The name under which the chunks of a tensor that is spread over ranks are saved."""
    # The group of rank 0 needs no prefix: either it is the only group, or the other groups have copies of its tensors.
    return f"group-{entry.group}.{entry.name}" if entry.group else entry.name


def _key(entry: TensorEntry, rank: int, plain: bool) -> str:
    if entry.global_shape is not None and not entry.replica:
        return whole_key(entry)
    return entry.name if plain and entry.global_shape is None else f"rank-{rank}.{entry.name}"


def _one_kind(topology: str) -> bool:
    """Whether the job has data parallelism only, so that rank 0 has the complete model if it is not sharded."""
    if not topology:
        return False
    sizes = Topology.parse(topology)
    return sizes.dp == sizes.world_size


def _stored(entry: TensorEntry) -> tuple[str, int, int]:
    """Type in the file, ``Part.width``, and the alignment of the tensor in bytes."""
    stored = _STORED.get(entry.dtype)
    width = 1 if stored else _WIDTHS.get(entry.dtype, 1)
    nbytes = math.prod(entry.shape) * (stored[1] if stored else width)
    if nbytes != entry.nbytes:
        raise CheckpointError(
            f"the tensor {entry.name} of {entry.dtype} {list(entry.shape)} has {entry.nbytes} bytes instead of "
            f"{nbytes}: this everstep cannot write it to disk"
        )
    return (stored[0], 1, stored[1]) if stored else ("U8", width, 1)


def _head(fields: dict[str, Any]) -> bytes:
    """Length and header of a safetensors file; spaces at the end let the tensors begin at a multiple of 64."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (aligned(U64.size + len(text), ALIGNMENT) - U64.size - len(text))
    return U64.pack(len(text)) + text
