"""A rank's state as a safetensors file with a manifest: written from a slot, and read back into a slot.

The file is also a shard of a checkpoint that torch's distributed checkpoint reads, with other parallel sizes too
(``everstep/shards/safetensors_layout.py``). It has every byte of the slot's payload, so that a rank restores from its
own slot as always. No torch here: the agent writes and reads these files, in a thread, with little memory.
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
from everstep.slots.file import SlotFile
from everstep.slots.format import SlotHeader, aligned

CHUNK_BYTES = 4 << 20
"""Most that is held in memory, beside a state's structure."""

ReadAt = Callable[[int, memoryview], int]
"""``read(offset, buffer)``: fills the buffer or a part of it; returns the bytes read, 0 when there are none."""
Pace = Callable[[int], object]
"""Called with the bytes of each piece that was moved: waits to keep a rate, raises to give up. ``write_shard`` calls
it with 0 when all is on the disk and nothing counts yet: who raises then can be sure that nothing ever will."""


def write_shard(
    folder: Path,
    *,
    job: str,
    rank: int,
    topology: str,
    header: SlotHeader,
    read: ReadAt,
    run: str = "",
    code_version: int = 0,
    pace: Pace | None = None,
) -> Manifest:
    """Write ``rank-<r>.safetensors`` and then ``rank-<r>.json``, each atomically and lastingly.

    A kill, a full disk or a slot that is overwritten meanwhile leave no file
    that counts: the payload's checksum is computed along the way.

    Args:
        folder: ``step_folder(root, job, step)``; made when it does not exist.
        job: Name of the job.
        rank: Whose state it is.
        topology: As in ``EVERSTEP_TOPOLOGY``; empty: not known.
        header: The slot's header, from ``SlotReader.header``.
        read: Reads the slot's payload, e.g. ``partial(reader.read_into, header)``.
        run: Which run of the job's name writes it; empty: not known.
        code_version: Which version of the job's code saved it; 0: not known.
        pace: Called after each piece of 4 MiB at most.

    Raises:
        CorruptCheckpoint: what was read is not the state of the header (any more).
        CheckpointError: the file cannot be written, on a full disk with numbers; or a tensor is of an unknown type.
        TopologyError: ``topology`` cannot be read.
    """
    payload = _Payload(header, read, pace)
    structure = payload.structure()
    layout = layout_of(table_of(structure), header, job=job, rank=rank, topology=topology)
    with Output(folder / data_name(rank), layout.bytes) as output:
        tensors, padding, pickled = _stream(payload, layout, output)
        if payload.checksum() != header.checksum or pickled != xxhash.xxh3_64_hexdigest(structure):
            raise CorruptCheckpoint(
                f"the slot of rank {rank} with the state after step {header.completed_steps} was overwritten, or is "
                "damaged, while it was written to disk"
            )
        manifest = Manifest(
            job=job,
            rank=rank,
            step=header.completed_steps,
            generation=header.generation,
            topology=topology,
            run=run,
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
        # An older manifest must not stand beside the new file, not even for a moment.
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
    """Put a state on disk or remote storage into a slot, verified from end to end.

    Args:
        manifest: The manifest of the file.
        read: Reads the file.
        slot_file: The slot file to write to.
        fill: Fills a buffer with the first bytes of the payload of another rank whose manifest of this step has the
            same digest. Then only small tensors and the structure are read from the file.
        newest_generation: Highest generation that the slot may be of.
        pace: Called after each piece that was read from the file.

    Raises:
        CorruptCheckpoint: file, or what ``fill`` gave, is not what the manifest says; the slot stays empty.
        CheckpointError: no room in shared memory.
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
                    raise CorruptCheckpoint(
                        f"the tensor {part.name} that another rank gave is not that of the manifest"
                    )
        padding = bytearray(manifest.padding.nbytes)
        read_piece(read, manifest.padding, memoryview(padding), "what is between the tensors", pace)
        done = 0
        for offset, size in spare:
            payload[offset : offset + size] = padding[done : done + size]
            done += size
        with payload[aligned(header.tensor_bytes) :] as view:
            read_piece(read, manifest.structure, view, "the structure", pace)
        slot_file.commit_received(header, xxhash.xxh3_64_intdigest(payload, seed=header.completed_steps))
    except BaseException:
        slot_file.abort()
        raise
    finally:
        payload.release()
    return header


def read_piece(read: ReadAt, piece: Part | Piece, view: memoryview, what: str, pace: Pace | None = None) -> None:
    """Fill ``view`` with a piece of a file.

    Raises:
        CorruptCheckpoint: the file ends before, or holds something else.
    """
    digest, done = xxhash.xxh3_64(), 0
    while done < piece.nbytes:
        with view[done : done + CHUNK_BYTES] as part:
            got = read(piece.at + done, part)
            if not got:
                raise CorruptCheckpoint(f"the file ends at byte {piece.at + done}, in {what}")
            digest.update(part[:got])
        done += got
        if pace is not None:
            pace(got)
    if digest.hexdigest() != piece.xxh3:
        raise CorruptCheckpoint(f"{what} does not match its checksum")


def verify_shard(manifest: Summary, read: ReadAt) -> str:
    """The damage of a file, after reading all of it; empty: none."""
    return verify_piece(Piece(at=0, nbytes=manifest.bytes, xxh3=manifest.xxh3), read)


def verify_piece(piece: Part | Piece, read: ReadAt) -> str:
    """The damage of a piece of a file, read with little memory; empty: none."""
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
    """``read(offset, buffer)`` of ``rank-<r>.safetensors``.

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
    """Write the payload in one pass; returns tensors with their digests, and the digests of padding and structure."""
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
        self._digest = xxhash.xxh3_64(seed=header.completed_steps)
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, max(self.end, 1))))

    def structure(self) -> bytes:
        """The structure, ahead of everything else and not verified yet."""
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
            self._digest.update(piece)
            yield piece
            self._done += got
            if self._pace is not None:
                self._pace(got)

    def checksum(self) -> int:
        """Checksum of the bytes that were read."""
        return self._digest.intdigest()

    def _some(self, offset: int, buffer: memoryview) -> int:
        got = self._read(offset, buffer)
        if not got:
            raise CorruptCheckpoint(
                f"the slot with the state after step {self._header.completed_steps} was overwritten while it was read"
            )
        return got
