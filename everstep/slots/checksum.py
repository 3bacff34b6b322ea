"""Computes the checksum of a slot's payload, with several threads where there are cores for them.

The payload is divided into pieces of ``PIECE_BYTES``. The checksum is the xxh3_64 of the list of the pieces' xxh3_64
(each u64, little endian), with the seed of the slot's owner and step (``SlotOwner.seed``). So pieces can be hashed at
the same time, and a payload never matches the header of another rank, job, run or step. The pieces themselves have no
seed: whoever has read a payload can compute its checksum for another owner without reading it again.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from typing import Self

import xxhash

from everstep.slots.owner import SlotOwner

PIECE_BYTES = 4 << 20
"""It is part of the format: another size gives other checksums."""
MOST_THREADS = 4
"""With four threads, hashing needs most of what the memory of a machine delivers."""
READ_BYTES = 1 << 20
"""Bytes that a thread reads before it hashes them, so that they are still in the cache."""

Read = Callable[[int, memoryview], int]
"""Reads a payload from an offset on into a buffer, and returns the number of bytes that it read; 0: it cannot."""


def hashing_threads(payloads: int) -> int:
    """Number of threads that may hash one payload: 1 to ``MOST_THREADS``.

    Args:
        payloads: Number of payloads that are hashed on this machine at the same time.
    """
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, payloads)))


class PayloadChecksum:
    """The checksum of a payload, which is given from its beginning on in parts of any size."""

    def __init__(self) -> None:
        self._pieces: list[int] = []
        self._open = xxhash.xxh3_64()
        self._filled = 0
        """Bytes of the piece that is not complete yet."""

    @classmethod
    def of(cls, read: Read, size: int, threads: int = 1) -> Self:
        """The checksum of a payload that its threads read; they need little memory.

        If a read gives no bytes, the rest of that piece is left out, so the checksum is not that of a complete payload.

        Args:
            read: Reads the payload; several threads call it.
            size: Bytes of the payload.
            threads: Number of threads that read and hash, this one included.
        """

        def hash_of(index: int) -> int:
            digest, at, end = xxhash.xxh3_64(), index * PIECE_BYTES, min(size, (index + 1) * PIECE_BYTES)
            buffer = memoryview(bytearray(min(READ_BYTES, end - at)))
            while at < end and (count := read(at, buffer[: end - at])):
                digest.update(buffer[:count])
                at += count
            return digest.intdigest()

        checksum = cls()
        checksum._pieces = _in_threads(hash_of, -(-size // PIECE_BYTES), threads)
        return checksum

    def update(self, part: bytes | bytearray | memoryview, threads: int = 1) -> None:
        """Add the next bytes of the payload; other threads run meanwhile.

        Args:
            part: The bytes.
            threads: Number of threads that hash, this one included.
        """
        if self._filled + len(part) < PIECE_BYTES:
            self._fill(part)
            return
        with memoryview(part) as view:
            at = PIECE_BYTES - self._filled if self._filled else 0
            self._fill(view[:at])
            whole = (len(view) - at) // PIECE_BYTES
            end = at + whole * PIECE_BYTES
            self._pieces += _hashes(view[at:end], threads)
            self._fill(view[end:])

    def value(self, owner: SlotOwner, completed_steps: int) -> int:
        """The checksum of all bytes so far, 64 bits, as the state of an owner after a number of completed steps."""
        pieces = [*self._pieces, self._open.intdigest()] if self._filled else self._pieces
        return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(pieces)}Q", *pieces), seed=owner.seed(completed_steps))

    def _fill(self, part: bytes | bytearray | memoryview) -> None:
        self._open.update(part)  # releases the GIL
        self._filled += len(part)
        if self._filled == PIECE_BYTES:
            self._pieces.append(self._open.intdigest())
            self._open, self._filled = xxhash.xxh3_64(), 0


def _hashes(view: memoryview, threads: int) -> list[int]:
    """Hashes of the pieces of a view, all of full size."""

    def hash_of(index: int) -> int:
        digest = xxhash.xxh3_64()
        digest.update(view[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
        return digest.intdigest()

    return _in_threads(hash_of, len(view) // PIECE_BYTES, threads)


def _in_threads(hash_of: Callable[[int], int], count: int, threads: int) -> list[int]:
    """The hashes of ``count`` pieces, each from its index."""
    hashes = [0] * count
    errors: list[BaseException] = []
    indexes = iter(range(count))  # threads share it; its ``next`` holds the GIL

    def work() -> None:
        try:
            for index in indexes:
                hashes[index] = hash_of(index)
        except BaseException as error:
            errors.append(error)

    helpers = [
        threading.Thread(target=work, name="everstep hashes", daemon=True) for _ in range(min(threads, count) - 1)
    ]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return hashes
