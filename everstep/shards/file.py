"""Writes a slot to a safetensors file with a manifest, and reads it back into a slot.

Torch's distributed checkpoint can also read the files of all ranks, even with other parallel sizes
(``everstep/shards/safetensors_layout.py``). A file has every byte of the slot's payload, so a restored slot equals the
saved one. This module does not import torch: the agent reads and writes the files, in a thread, with little memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.shards.atomic_output import Output, replace_file
from everstep.shards.manifest import SHARED_BYTES, Manifest, Part, Piece, Summary, data_name, digest_of, manifest_name
from everstep.shards.safetensors_layout import FileLayout, layout_of, table_of
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.file import SlotFile
from everstep.slots.format import SlotHeader, aligned
from everstep.slots.owner import SlotOwner

CHUNK_BYTES = 4 << 20
"""The most bytes of a file that are in memory at once, apart from the state's structure."""

ReadAt = Callable[[int, memoryview], int]
"""``read(offset, buffer)`` fills the buffer or a part of it, and returns the number of bytes read; 0: there are
none."""
Pace = Callable[[int], object]
"""A function that is called with the number of bytes of each piece that was moved. It may wait, to keep a rate, or
raise an error, to end the transfer. ``write_shard`` also calls it with 0, when all data is on the disk but the file
does not count yet: if the function raises an error then, the file never counts."""


def write_shard(
    folder: Path,
    *,
    owner: SlotOwner,
    topology: str,
    header: SlotHeader,
    read: ReadAt,
    code_version: int = 0,
    pace: Pace | None = None,
) -> Manifest:
    """Write ``rank-<r>.safetensors`` and then ``rank-<r>.json``, each atomically and lastingly.

    After a kill, on a full disk, or if the slot is overwritten meanwhile, there is no file that counts.

    Args:
        folder: ``step_folder(root, job, step)``; made when it does not exist.
        owner: The rank whose state is written, in the run that writes it.
        topology: Text of the job's topology, as in ``EVERSTEP_TOPOLOGY``; empty: not known.
        header: The slot's header, from ``SlotReader.header``.
        read: Reads the slot's payload, e.g. ``partial(reader.read_into, header)``.
        code_version: Number of the version of the job's code that saved the state; 0: not known.
        pace: Called after each piece of at most 4 MiB.

    Raises:
        CorruptCheckpoint: the slot's payload does not, or no longer, match its header.
        CheckpointError: the file cannot be written, or a tensor has an unknown type.
        TopologyError: ``topology`` cannot be read.
    """
    rank, payload = owner.rank, _Payload(header, read, pace)
    structure = payload.structure()
    layout = layout_of(table_of(structure), header, job=owner.job, rank=rank, topology=topology)
    with Output(folder / data_name(rank), layout.bytes) as output:
        tensors, padding, pickled = _stream(payload, layout, output)
        found = payload.checksum.value(owner, header.completed_steps)
        if found != header.checksum or pickled != xxhash.xxh3_64_hexdigest(structure):
            raise CorruptCheckpoint(
                f"the slot of rank {rank} with the state after step {header.completed_steps} was overwritten, or is "
                "damaged, while it was written to disk"
            )
        manifest = Manifest(
            job=owner.job,
            rank=rank,
            step=header.completed_steps,
            generation=header.generation,
            topology=topology,
            run=owner.run,
            code_version=code_version,
            saved_ns=header.saved_ns,
            bytes=layout.bytes,
            xxh3=output.digest(),
            digest=digest_of(tensors),
            tensor_bytes=header.tensor_bytes,
            checksum=f"{header.checksum:016x}",
            head=Piece(at=0, nbytes=len(layout.head), xxh3=xxhash.xxh3_64_hexdigest(layout.head)),
            tensors=tensors,
            padding=layout.padding.model_copy(update={"xxh3": padding}),
            structure=layout.structure.model_copy(update={"xxh3": pickled}),
        )
        output.sync()
        if pace is not None:
            pace(0)
        # The older manifest is deleted first: it must never exist beside the new file.
        output.commit(outdated=folder / manifest_name(rank))
    replace_file(folder / manifest_name(rank), manifest.to_json().encode())
    return manifest


def restore(
    manifest: Manifest,
    read: ReadAt,
    slot_file: SlotFile,
    *,
    fill: Callable[[memoryview], object] | None = None,
    newest_generation: int | None = None,
    pace: Pace | None = None,
) -> SlotHeader:
    """Read a state from disk or remote storage into a slot, and verify all of it.

    Args:
        manifest: The manifest of the file.
        read: Reads the file.
        slot_file: The slot file to write to. The state becomes that of its owner, also if it is of another job or run.
        fill: Fills a buffer with the tensors of another rank whose manifest of this step has the same digest. Then only
            small tensors and the structure are read from the file.
        newest_generation: The slot gets this generation if the file's generation is higher; None: the file's generation
            is kept.
        pace: Called after each piece that was read from the file.

    Raises:
        CorruptCheckpoint: the file, or the bytes from ``fill``, do not match the manifest; the slot stays empty.
        CheckpointError: there is no room in shared memory.
    """
    header = manifest.slot_header(newest_generation)
    spare = manifest.gaps()
    payload = slot_file.receive(header)
    try:
        if fill is not None:
            with payload[: header.tensor_bytes] as tensors:
                fill(tensors)
        for part in manifest.tensors:
            with payload[part.offset : part.offset + part.nbytes] as view:
                if fill is None or part.nbytes < SHARED_BYTES:
                    read_piece(read, part, view, f"the tensor {part.name}", pace)
                elif xxhash.xxh3_64_hexdigest(view) != part.xxh3:
                    raise CorruptCheckpoint(f"the tensor {part.name} from another rank does not match the manifest")
        padding = bytearray(manifest.padding.nbytes)
        read_piece(read, manifest.padding, memoryview(padding), "the bytes between the tensors", pace)
        done = 0
        for offset, size in spare:
            payload[offset : offset + size] = padding[done : done + size]
            done += size
        with payload[aligned(header.tensor_bytes) :] as view:
            read_piece(read, manifest.structure, view, "the structure", pace)
        checksum = PayloadChecksum()
        checksum.update(payload, slot_file.threads)
        return slot_file.commit_received(header, checksum, origin=manifest.owner)
    except BaseException:
        slot_file.abort()
        raise
    finally:
        payload.release()


def read_piece(read: ReadAt, piece: Part | Piece, view: memoryview, name: str, pace: Pace | None = None) -> None:
    """Fill ``view`` with a piece of a file.

    Args:
        read: Reads the file.
        piece: The position and the checksum of the piece.
        view: The buffer to fill.
        name: What the piece is, for messages.
        pace: Called after each part of at most 4 MiB.

    Raises:
        CorruptCheckpoint: the file is too short, or the piece does not match its checksum.
    """
    digest, done = xxhash.xxh3_64(), 0
    while done < piece.nbytes:
        with view[done : done + CHUNK_BYTES] as part:
            got = read(piece.at + done, part)
            if not got:
                raise CorruptCheckpoint(f"the file ends at byte {piece.at + done}, in {name}")
            digest.update(part[:got])
        done += got
        if pace is not None:
            pace(got)
    if digest.hexdigest() != piece.xxh3:
        raise CorruptCheckpoint(f"{name} does not match its checksum")


def verify_shard(manifest: Summary, read: ReadAt) -> str:
    """Read a complete file; returns how it is damaged; empty: it is intact."""
    return verify_piece(Piece(at=0, nbytes=manifest.bytes, xxh3=manifest.xxh3), read)


def verify_piece(piece: Part | Piece, read: ReadAt) -> str:
    """Read a piece of a file, with little memory; returns how it is damaged; empty: it is intact."""
    digest, done = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(piece.nbytes, 1))))
    while done < piece.nbytes:
        got = read(piece.at + done, buffer[: piece.nbytes - done])
        if not got:
            return f"truncated: {done} of {piece.nbytes} bytes are there"
        digest.update(buffer[:got])
        done += got
    return "" if digest.hexdigest() == piece.xxh3 else "the contents do not match their checksum"


@contextlib.contextmanager
def open_shard(folder: Path, rank: int) -> Iterator[ReadAt]:
    """Open ``rank-<r>.safetensors``; the context manager gives a function that reads it.

    Raises:
        CheckpointError: it cannot be opened.
    """
    path = folder / data_name(rank)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield lambda offset, buffer: os.preadv(descriptor, [buffer], offset)
    finally:
        os.close(descriptor)


def _stream(payload: _Payload, layout: FileLayout, output: Output) -> tuple[tuple[Part, ...], str, str]:
    """Write the payload in one pass; returns the tensors with their digests, and the digests of padding and
    structure."""
    output.write(layout.head)
    padding, tensors = bytearray(), []
    for part in layout.tensors:
        for piece in payload.until(part.offset):
            padding += piece
        output.fill(part.at)
        digest = xxhash.xxh3_64()
        for piece in payload.until(part.offset + part.nbytes):
            digest.update(piece)
            output.write(piece)
        tensors.append(part.model_copy(update={"xxh3": digest.hexdigest()}))
    for piece in payload.until(payload.structure_at):
        padding += piece
    output.write(padding)
    digest = xxhash.xxh3_64()
    for piece in payload.until(payload.end):
        digest.update(piece)
        output.write(piece)
    return tuple(tensors), xxhash.xxh3_64_hexdigest(padding), digest.hexdigest()


class _Payload:
    """A slot's payload, read in order while its checksum is computed."""

    def __init__(self, header: SlotHeader, read: ReadAt, pace: Pace | None) -> None:
        self.structure_at = aligned(header.tensor_bytes)
        self.end = header.payload_bytes
        self._header, self._read, self._pace = header, read, pace
        self._done = 0
        self.checksum = PayloadChecksum()
        """Checksum of the bytes that were read."""
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, max(self.end, 1))))

    def structure(self) -> bytes:
        """The structure, which is read first and not verified yet."""
        structure, done = bytearray(self._header.structure_bytes), 0
        with memoryview(structure) as view:
            while done < len(structure):
                done += self._some(self.structure_at + done, view[done:])
        return bytes(structure)

    def until(self, end: int) -> Iterator[memoryview]:
        """The next pieces, up to byte ``end`` of the payload; each is valid until the next piece is read."""
        while self._done < end:
            got = self._some(self._done, self._buffer[: end - self._done])
            piece = self._buffer[:got]
            self.checksum.update(piece)
            yield piece
            self._done += got
            if self._pace is not None:
                self._pace(got)

    def _some(self, offset: int, buffer: memoryview) -> int:
        got = self._read(offset, buffer)
        if not got:
            raise CorruptCheckpoint(
                f"the slot with the state after step {self._header.completed_steps} was overwritten while it was read"
            )
        return got
