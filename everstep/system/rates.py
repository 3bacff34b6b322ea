"""Measures how fast this computer copies, hashes, allocates and writes, as saves and restores do it.

All rates are bytes per second. A measurement is repeated, and the fastest repetition counts, since other programs can
only make it slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from everstep.system.pages import READ, WRITE, populate

BLOCK = 4 << 20
"""Bytes of one write to a file, and of one read of it."""
CHUNK = 1 << 20
"""Bytes of one read of a slot by an agent that verifies it."""
PIECE = 256 << 10
"""Bytes of a piece that a restore copies and hashes."""


@dataclass(frozen=True, slots=True)
class MemoryRates:
    """Rates of memory, bytes per second; one thread, unless said otherwise."""

    copy: float
    """From private memory into shared memory whose pages are present, tensor by tensor."""
    copy_pieces: float
    """From shared memory into private memory, in small pieces."""
    copy_all: float
    """From private into shared memory, all threads together."""
    hash: float
    """xxh3 of shared memory."""
    hash_cached: float
    """xxh3 of bytes in the processor's cache."""
    hash_all: float
    """xxh3 of shared memory, all threads together."""
    verify: float
    """Shared memory that is read as a file, and hashed."""
    allocate: float
    """New pages of shared memory, which the kernel clears."""
    map_write: float
    """Pages of shared memory that exist, and that this process makes present to write to them."""
    map: float
    """The same, to read them."""
    clear: float
    """New private memory, in huge pages if the kernel has them."""
    unmap: float
    """Pages of shared memory that the end of a process unmaps."""


def memory_rates(
    folder: Path, *, size: int, tensor: int, threads: int, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> MemoryRates:
    """Measure all rates of memory.

    Args:
        folder: A folder in shared memory, with room for ``threads`` times ``size`` bytes.
        size: Bytes that each thread moves in one measurement; they should not fit into the processor's caches.
        tensor: Bytes of a tensor. A large tensor is copied past the processor's caches, which is faster.
        threads: Number of threads for the rates of all threads together.
        rounds: Number of repetitions.
        clock: Gives seconds. With ``time.process_time``, the rates are bytes per second of CPU time, so that they
            hardly depend on other programs; then those of all threads together have no meaning.

    Raises:
        OSError: there is no room.
    """
    found: dict[str, float] = {}

    def take(name: str, count: int, work: Callable[..., object], *args: Any) -> None:
        began = clock()
        work(*args)
        found[name] = max(found.get(name, 0.0), count / (clock() - began))

    for _ in range(rounds):
        with tempfile.TemporaryFile(dir=folder) as file, _Region(size) as private:
            descriptor = file.fileno()
            os.ftruncate(descriptor, size)
            take("allocate", size, os.posix_fallocate, descriptor, 0, size)
            with _Region(size, descriptor) as shared, _Region(size, descriptor) as other:
                take("map_write", size, populate, shared.address, size, WRITE)
                take("map", size, populate, other.address, size, READ)
                take("clear", size, populate, private.address, size, WRITE)
                take("copy", size, _copy, shared.address, private.address, size, tensor)
                take("copy_pieces", size, _copy, private.address, other.address, size, PIECE)
                take("hash", size, xxhash.xxh3_64_intdigest, shared.map)
                take("hash_cached", size, _hash_again, bytes(PIECE), size // PIECE)
                take("verify", size, _read_and_hash, descriptor, size)
                take("unmap", size, shared.close)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        pairs = [stack.enter_context(_pair(folder, size, tensor)) for _ in range(threads)]
        for _ in range(rounds):
            take("copy_all", threads * size, _together, pool, [pair.copy for pair in pairs])
            take("hash_all", threads * size, _together, pool, [pair.hash for pair in pairs])
    return MemoryRates(**found)


def disk_write_rate(folder: Path, size: int) -> float:
    """The rate at which a file is written and flushed to the disk of a folder.

    Args:
        folder: A folder on the disk; the file has no name there, and its space is free again afterwards.
        size: Bytes of the file.

    Raises:
        OSError: the file cannot be written.
    """
    block = os.urandom(BLOCK)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(max(1, size // BLOCK)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return file.tell() / (time.perf_counter() - began)


class _Region:
    """A mapped region: of a file, or of new private memory."""

    def __init__(self, size: int, descriptor: int = -1) -> None:
        flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.map = mmap.mmap(descriptor, size, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if descriptor < 0:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.map.madvise(mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap the region."""
        self.map.close()

    def __enter__(self) -> _Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Pair:
    """Private memory, and shared memory of the same size."""

    private: _Region
    shared: _Region
    tensor: int

    def copy(self) -> None:
        _copy(self.shared.address, self.private.address, len(self.private.map), self.tensor)

    def hash(self) -> None:
        xxhash.xxh3_64_intdigest(self.shared.map)


@contextlib.contextmanager
def _pair(folder: Path, size: int, tensor: int) -> Iterator[_Pair]:
    """Regions whose pages are present."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        with _Region(size) as private, _Region(size, file.fileno()) as shared:
            for region in (private, shared):
                populate(region.address, size, WRITE)
            yield _Pair(private, shared, tensor)


def _together(pool: ThreadPoolExecutor, work: Sequence[Callable[[], None]]) -> None:
    for done in [pool.submit(each) for each in work]:
        done.result()


def _copy(target: int, source: int, size: int, run: int) -> None:
    for at in range(0, size, run):
        ctypes.memmove(target + at, source + at, min(run, size - at))


def _hash_again(data: bytes, times: int) -> int:
    digest = xxhash.xxh3_64()
    for _ in range(times):
        digest.update(data)
    return digest.intdigest()


def _read_and_hash(descriptor: int, size: int) -> int:
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(CHUNK))
    for at in range(0, size, CHUNK):
        digest.update(buffer[: os.preadv(descriptor, [buffer], at)])
    return digest.intdigest()
