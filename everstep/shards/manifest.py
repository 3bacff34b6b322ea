"""Defines the manifest of a rank's file on disk, which describes the contents of the file with checksums.

A checkpoint on disk is a folder ``<root>/<job>/step-000000120`` with two files of each rank: ``rank-3.safetensors``,
and ``rank-3.json``, the manifest, which is written last. A file counts as a copy only if it has an intact manifest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.format import SlotHeader
from everstep.slots.owner import SlotOwner

VERSION = 2
SHARED_BYTES = 16384
"""Only tensors with at least this many bytes are part of ``Summary.digest``. Data that differs between the ranks of a
data-parallel group is smaller: states of random number generators (5 KB), positions in the data, batch statistics."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TensorEntry(_Model):
    """A tensor in the table of a slot's structure."""

    name: str
    """Path of keys in the rank's state, joined by dots."""
    dtype: str
    """Name of the type in torch, without ``torch.``."""
    shape: tuple[int, ...]
    """Shape of the part that this rank holds."""
    offset: int = Field(ge=0)
    """Bytes from the beginning of the slot's tensors."""
    nbytes: int = Field(ge=0)
    global_shape: tuple[int, ...] | None = None
    """Shape of the complete tensor of which this is a chunk; None: it is not a chunk."""
    offsets: tuple[int, ...] | None = None
    """Index in the complete tensor at which the chunk begins."""
    replica: bool = False
    """Another rank has the same chunk and saves it under the tensor's name."""
    group: int | None = None
    """Lowest rank of the tensor's device mesh; None: the mesh has all ranks of the job."""

    @model_validator(mode="after")
    def _same_dimensions(self) -> Self:
        if self.global_shape is not None and not len(self.shape) == len(self.global_shape) == len(self.offsets or ()):
            raise ValueError(f"{self.name}: {self.shape} at {self.offsets} is not a chunk of {self.global_shape}")
        return self


class Part(TensorEntry):
    """A tensor and its position in the file."""

    key: str
    """The tensor's name in the safetensors file."""
    stored: str
    """The tensor's type in the safetensors file; ``U8`` for types that safetensors does not have."""
    width: int = 1
    """Number of bytes of an element, if the type is stored as ``U8``; else 1."""
    at: int = Field(ge=0)
    """Bytes from the beginning of the file."""
    xxh3: str = ""
    """xxh3_64 of its bytes, hexadecimal."""

    def stored_shape(self) -> list[int]:
        """Shape in the file; elements that are stored as several bytes add a last dimension."""
        return [*self.shape, self.width] if self.width > 1 else list(self.shape)

    def stored_offsets(self) -> list[int]:
        """Index in the complete tensor at which the chunk begins, in the dimensions of the file."""
        offsets = list(self.offsets or [0] * len(self.shape))
        return [*offsets, 0] if self.width > 1 else offsets


class Piece(_Model):
    """A range of the file, with the checksum of its bytes."""

    at: int = Field(ge=0)
    nbytes: int = Field(ge=0)
    xxh3: str = ""


class Summary(_Model):
    """The fields of a manifest without its tensors. They are read quickly even if there are many tensors."""

    version: int = VERSION
    job: str
    rank: int = Field(ge=0)
    step: int = Field(ge=0, lt=1 << 62)
    """Completed steps."""
    generation: int = Field(ge=0, lt=1 << 31)
    """Generation of the job that saved the state."""
    topology: str
    """Text of the job's topology, as in ``EVERSTEP_TOPOLOGY``; empty: not known."""
    run: str = ""
    """Id of the run that wrote it (``everstep/model/run_id.py``); empty: not known."""
    code_version: int = Field(0, ge=0)
    """Number of the version of the job's code that saved the state; 0: not known."""
    saved_ns: int = Field(ge=0, lt=1 << 63)
    """When the rank saved it, nanoseconds of the wall clock."""
    bytes: int = Field(ge=0)
    """Size of the file."""
    xxh3: str
    """xxh3_64 of the complete file."""
    digest: str
    """Digest of names, offsets and contents of the tensors with at least 16 KiB; empty: there are none. Ranks with
    equal digests have the same tensors of that size in their slots."""
    tensor_bytes: int = Field(ge=0)
    checksum: str = Field(pattern="^[0-9a-f]{16}$")
    """Checksum of the slot's payload, from its header."""

    @property
    def owner(self) -> SlotOwner:
        """The rank, job and run that saved the state; the checksum is theirs."""
        return SlotOwner(self.job, self.run, self.rank)


_Summary = TypeVar("_Summary", bound=Summary)


class Manifest(Summary):
    """The description of ``rank-<r>.safetensors``."""

    head: Piece
    """Length and header of the safetensors file."""
    tensors: tuple[Part, ...]
    """The tensors, in the order of the payload, which is also the order of the file."""
    padding: Piece
    """The bytes of the payload between the tensors."""
    structure: Piece
    """The structure of the slot: the table of tensors and the pickled tree."""

    @model_validator(mode="after")
    def _within_the_file(self) -> Self:
        pieces: list[Part | Piece] = [self.head, *self.tensors, self.padding, self.structure]
        if max(self.tensor_bytes, *(piece.at + piece.nbytes for piece in pieces)) > self.bytes:
            raise ValueError(f"a part of it lies beyond the {self.bytes} bytes of the file")
        return self

    def slot_header(self, newest_generation: int | None = None) -> SlotHeader:
        """The header of the slot that the file was written from.

        Args:
            newest_generation: Replaces a higher generation, which another run of the job had; None: nothing is
                replaced.
        """
        generation = self.generation if newest_generation is None else min(self.generation, newest_generation)
        return SlotHeader(
            self.step, generation, self.tensor_bytes, self.structure.nbytes, int(self.checksum, 16), self.saved_ns
        )

    def gaps(self) -> list[tuple[int, int]]:
        """Offset and length, bytes, of each gap between the payload's tensors, and of the gap before the structure.

        Raises:
            CorruptCheckpoint: tensors overlap or lie outside, or the file has another number of bytes for the gaps.
        """
        unused = gaps(self.tensors, self.slot_header().payload_bytes - self.structure.nbytes)
        if (size := sum(size for _, size in unused)) != self.padding.nbytes:
            raise CorruptCheckpoint(f"{size} bytes lie between the tensors, but the file has {self.padding.nbytes}")
        return unused

    def to_json(self) -> str:
        """The text of ``rank-<r>.json``."""
        body = json.dumps(self.model_dump(mode="json", exclude_defaults=True) | {"version": self.version})
        return f"{_opening(body.encode())}{body}}}"


def data_name(rank: int) -> str:
    """Name of the file with a rank's state."""
    return f"rank-{rank}.safetensors"


def manifest_name(rank: int) -> str:
    """Name of the manifest of a rank's file."""
    return f"rank-{rank}.json"


def read_manifest(folder: Path, rank: int) -> Manifest:
    """The manifest of a rank in a ``step-…`` folder.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
        CorruptCheckpoint: it is damaged.
    """
    return parse_manifest(_text(folder, rank), str(folder / manifest_name(rank)), rank)


def read_summary(folder: Path, rank: int) -> Summary:
    """``read_manifest`` without the tensors."""
    return parse_summary(_text(folder, rank), str(folder / manifest_name(rank)), rank)


def parse_manifest(text: bytes, source: str, rank: int | None = None) -> Manifest:
    """A manifest from its text.

    Args:
        text: Contents of ``rank-<r>.json``.
        source: Its path or URL, for messages.
        rank: The rank that it must describe; None: any rank.

    Raises:
        CorruptCheckpoint: it is damaged, or describes another rank.
    """
    return _parse(Manifest, text, source, rank)


def parse_summary(text: bytes, source: str, rank: int | None = None) -> Summary:
    """``parse_manifest`` without the tensors."""
    return _parse(Summary, text, source, rank)


def digest_of(parts: Sequence[Part]) -> str:
    """The ``Summary.digest`` of a rank's tensors."""
    shared = [part for part in parts if part.nbytes >= SHARED_BYTES]
    if not shared:
        return ""
    rows = [[part.name, part.dtype, list(part.shape), part.offset, part.nbytes, part.xxh3] for part in shared]
    return xxhash.xxh3_64_hexdigest(json.dumps(rows, separators=(",", ":")).encode())


def gaps(tensors: Sequence[TensorEntry], end: int) -> list[tuple[int, int]]:
    """Offset and length, bytes, of each range before ``end`` that belongs to no tensor.

    Args:
        tensors: The tensors in the order of their offsets.
        end: Number of bytes.

    Raises:
        CorruptCheckpoint: tensors overlap or lie outside.
    """
    unused, done = [], 0
    for tensor in tensors:
        if tensor.offset < done:
            raise CorruptCheckpoint(f"the tensor {tensor.name} overlaps the one before it")
        if tensor.offset > done:
            unused.append((done, tensor.offset - done))
        done = tensor.offset + tensor.nbytes
    if done > end:
        raise CorruptCheckpoint(f"the tensors end at byte {done} of {end}")
    if end > done:
        unused.append((done, end - done))
    return unused


def _text(folder: Path, rank: int) -> bytes:
    path = folder / manifest_name(rank)
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _opening(body: bytes) -> str:
    """Beginning of a manifest's file, with the checksum of the body that follows; a closing brace ends the file."""
    return f'{{"checksum": "{xxhash.xxh3_64_hexdigest(body)}", "manifest": '


_OPENING_BYTES = len(_opening(b""))


def _parse(kind: type[_Summary], text: bytes, source: str, rank: int | None) -> _Summary:
    body = text[_OPENING_BYTES:-1]
    if text != b"%s%s}" % (_opening(body).encode(), body):
        raise CorruptCheckpoint(f"{source} does not match its own checksum")
    try:
        fields = json.loads(body)
        if fields.get("version") != VERSION:
            raise CorruptCheckpoint(
                f"{source} has version {fields.get('version')}, but this everstep reads version {VERSION}"
            )
        manifest = kind.model_validate(fields)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{source} is not a manifest: {str(error).splitlines()[0]}") from error
    if rank is not None and manifest.rank != rank:
        raise CorruptCheckpoint(f"{source} is the manifest of rank {manifest.rank}")
    return manifest
