"""The manifest beside the file of a rank's state on disk: its contents, with a checksum of everything.

A checkpoint on disk is a folder ``<root>/<job>/step-000000120`` with two files of each rank: ``rank-3.safetensors``,
and ``rank-3.json``, the manifest, written last. Without a manifest whose own checksum holds there is no copy.
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

VERSION = 1
SHARED_BYTES = 16384
"""Tensors from this size on make up the digest. What differs between the ranks of a data-parallel group although
its parameters are alike is smaller: states of random number generators (5 KB), positions, batch statistics."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TensorEntry(_Model):
    """A tensor in the table of a slot's structure."""

    name: str
    """Key path in the rank's state, joined by dots."""
    dtype: str
    """torch's name, without ``torch.``."""
    shape: tuple[int, ...]
    """Shape of the part that this rank holds."""
    offset: int = Field(ge=0)
    """Bytes from the beginning of the slot's tensors."""
    nbytes: int = Field(ge=0)
    global_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor, if this is a chunk of one; None: it is none."""
    offsets: tuple[int, ...] | None = None
    """Index in the whole tensor at which the chunk begins."""
    replica: bool = False
    """Another rank holds the same chunk and saves it."""
    group: int | None = None
    """Lowest rank of the mesh of the whole tensor, when the mesh leaves ranks of the job out."""

    @model_validator(mode="after")
    def _same_dimensions(self) -> Self:
        if self.global_shape is not None and not len(self.shape) == len(self.global_shape) == len(self.offsets or ()):
            raise ValueError(f"{self.name}: {self.shape} at {self.offsets} is no chunk of {self.global_shape}")
        return self


class Part(TensorEntry):
    """A tensor, and where it is in the file."""

    key: str
    """The tensor's name in the safetensors file."""
    stored: str
    """The tensor's type there; ``U8`` also for types that safetensors does not have."""
    width: int = 1
    """Bytes of an element that is stored as several bytes."""
    at: int = Field(ge=0)
    """Bytes from the beginning of the file."""
    xxh3: str = ""
    """xxh3_64 of its bytes, hexadecimal like all of them."""

    def stored_shape(self) -> list[int]:
        """Shape in the file: for types that safetensors does not have, the bytes of an element are a last dimension."""
        return [*self.shape, self.width] if self.width > 1 else list(self.shape)

    def stored_offsets(self) -> list[int]:
        """Index in the whole tensor at which the chunk begins, in the file's dimensions."""
        offsets = list(self.offsets or [0] * len(self.shape))
        return [*offsets, 0] if self.width > 1 else offsets


class Piece(_Model):
    """A range of the file that is no tensor of the state."""

    at: int = Field(ge=0)
    nbytes: int = Field(ge=0)
    xxh3: str = ""


class Summary(_Model):
    """The head of a manifest, without its tensors: quickly read, however many tensors there are."""

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
    """xxh3_64 of the whole file."""
    digest: str
    """Digest of the tensors of 16 KiB and more: names, offsets and contents. Ranks with equal digests have equal
    tensors in their slots. Empty: there are none."""
    tensor_bytes: int = Field(ge=0)
    checksum: str = Field(pattern="^[0-9a-f]{16}$")
    """Checksum of the slot's payload, as in its header: seeded with the step."""


_Summary = TypeVar("_Summary", bound=Summary)


class Manifest(Summary):
    """All about ``rank-<r>.safetensors``."""

    head: Piece
    """Length and header of the safetensors file."""
    tensors: tuple[Part, ...]
    """The tensors, in the order of payload and file."""
    padding: Piece
    """The bytes of the payload between tensors."""
    structure: Piece
    """The structure of the slot: table, and pickle of the tree."""

    @model_validator(mode="after")
    def _within_the_file(self) -> Self:
        pieces: list[Part | Piece] = [self.head, *self.tensors, self.padding, self.structure]
        if max(self.tensor_bytes, *(piece.at + piece.nbytes for piece in pieces)) > self.bytes:
            raise ValueError(f"something of it lies beyond the {self.bytes} bytes of the file")
        return self

    def slot_header(self, newest_generation: int | None = None) -> SlotHeader:
        """The header of the slot that the file was written from.

        Args:
            newest_generation: A higher generation is replaced by this one, since it is of another run of the job.
        """
        generation = self.generation if newest_generation is None else min(self.generation, newest_generation)
        return SlotHeader(
            self.step, generation, self.tensor_bytes, self.structure.nbytes, int(self.checksum, 16), self.saved_ns
        )

    def gaps(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what lies between the tensors of the payload and before the structure.

        Raises:
            CorruptCheckpoint: tensors overlap or lie outside, or the file has not so many bytes of it.
        """
        unused = gaps(self.tensors, self.slot_header().payload_bytes - self.structure.nbytes)
        if (size := sum(size for _, size in unused)) != self.padding.nbytes:
            raise CorruptCheckpoint(f"{size} bytes lie between the tensors, the file has {self.padding.nbytes}")
        return unused

    def to_json(self) -> str:
        """The text of ``rank-<r>.json``."""
        body = json.dumps(self.model_dump(mode="json", exclude_defaults=True) | {"version": self.version})
        return f"{_opening(body.encode())}{body}}}"


def data_name(rank: int) -> str:
    """Name of the file with a rank's state."""
    return f"rank-{rank}.safetensors"


def manifest_name(rank: int) -> str:
    """Name of the manifest beside it."""
    return f"rank-{rank}.json"


def read_manifest(folder: Path, rank: int) -> Manifest:
    """The manifest of a rank in a ``step-…`` folder.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        CorruptCheckpoint: it is damaged.
    """
    return parse_manifest(_text(folder, rank), str(folder / manifest_name(rank)), rank)


def read_summary(folder: Path, rank: int) -> Summary:
    """This manifest without its tensors."""
    return parse_summary(_text(folder, rank), str(folder / manifest_name(rank)), rank)


def parse_manifest(text: bytes, whence: str, rank: int | None = None) -> Manifest:
    """A manifest from its text.

    Args:
        text: Contents of ``rank-<r>.json``.
        whence: Its path or URL, for messages.
        rank: Whose it must be.

    Raises:
        CorruptCheckpoint: it is damaged.
    """
    return _parse(Manifest, text, whence, rank)


def parse_summary(text: bytes, whence: str, rank: int | None = None) -> Summary:
    """This manifest without its tensors."""
    return _parse(Summary, text, whence, rank)


def digest_of(parts: Sequence[Part]) -> str:
    """``Manifest.digest`` of some tensors."""
    shared = [part for part in parts if part.nbytes >= SHARED_BYTES]
    if not shared:
        return ""
    rows = [[part.name, part.dtype, list(part.shape), part.offset, part.nbytes, part.xxh3] for part in shared]
    return xxhash.xxh3_64_hexdigest(json.dumps(rows, separators=(",", ":")).encode())


def gaps(tensors: Sequence[TensorEntry], end: int) -> list[tuple[int, int]]:
    """(offset, bytes) of what tensors, in the order of their offsets, leave of the bytes before ``end``.

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
    """Begin of a manifest's file: the checksum of the rest without its last character, the closing brace."""
    return f'{{"checksum": "{xxhash.xxh3_64_hexdigest(body)}", "manifest": '


_OPENING_BYTES = len(_opening(b""))


def _parse(kind: type[_Summary], text: bytes, whence: str, rank: int | None) -> _Summary:
    body = text[_OPENING_BYTES:-1]
    if text != b"%s%s}" % (_opening(body).encode(), body):
        raise CorruptCheckpoint(f"{whence} does not match its own checksum")
    try:
        fields = json.loads(body)
        if fields.get("version") != VERSION:
            raise CorruptCheckpoint(
                f"{whence} has version {fields.get('version')}, this everstep reads version {VERSION}"
            )
        manifest = kind.model_validate(fields)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{whence} is no manifest: {str(error).splitlines()[0]}") from error
    if rank is not None and manifest.rank != rank:
        raise CorruptCheckpoint(f"{whence} is that of rank {manifest.rank}")
    return manifest
