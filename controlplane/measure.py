"""Measures the sizes and rates of this computer for ``everstep plan``."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.system.memory import free, memory_available
from everstep.system.rates import disk_write_rate, memory_rates

SHM = Path("/dev/shm")
SYS = Path("/sys")
MOST_BYTES = 256 << 20
"""Bytes that each thread moves in one measurement, if there is room."""
LEAST_BYTES = 1 << 20
MEMORY_SHARE = 0.1
"""Largest share of the free shared memory that a measurement uses."""
MOST_THREADS = 32
"""Largest number of threads that copy at once; on most machines fewer threads use all of the memory's bandwidth."""
ROUNDS = 5
TENSOR_BYTES = 32 << 20
"""Bytes of a tensor, unless its size is given."""
DISK_BYTES = 256 << 20

Measured = dict[str, float]
"""Field of ``Hardware`` → its value on this computer. What cannot be measured here is left out."""


def measure(folder: Path, *, tensor: int = TENSOR_BYTES, rounds: int = ROUNDS) -> Measured:
    """Measure memory, processors, disk, network cards and a GPU of this computer; takes some seconds.

    Args:
        folder: A folder on the disk for checkpoints.
        tensor: Bytes of a tensor.
        rounds: Number of repetitions of each measurement of memory.

    Raises:
        OSError: ``folder`` cannot be written to, or /dev/shm has no room.
    """
    return (
        {**measure_memory(tensor=tensor, rounds=rounds), "disk_write_gb_s": disk_write_rate(folder, DISK_BYTES) / 1e9}
        | cards()
        | _gpu()
    )


def measure_memory(
    *, tensor: int = TENSOR_BYTES, rounds: int = ROUNDS, clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """Measure memory and processors; arguments and errors are those of ``memory_rates``.

    Raises:
        OSError: /dev/shm has no room.
    """
    cores = len(os.sched_getaffinity(0))
    threads = min(cores, MOST_THREADS)
    shm, available = free(SHM), memory_available()
    size = min(MOST_BYTES, int(MEMORY_SHARE * min(shm, available) / threads))
    size -= size % mmap.PAGESIZE
    if size < LEAST_BYTES:
        raise OSError(f"{SHM} has only {shm / 1e6:.0f} MB of room, too little to measure: free some, or make it larger")
    rates = memory_rates(SHM, size=size, tensor=tensor, threads=threads, rounds=rounds, clock=clock)
    return {
        "memory_gb": available / 1e9,
        "shm_gb": shm / 1e9,
        "cores": cores,
        "memory_gb_s": max(2 * rates.copy_all, rates.hash_all) / 1e9,
        "copy_gb_s": rates.copy / 1e9,
        "piece_copy_gb_s": rates.copy_pieces / 1e9,
        "hash_gb_s": rates.hash / 1e9,
        "cached_hash_gb_s": rates.hash_cached / 1e9,
        "verify_gb_s": rates.verify / 1e9,
        "allocate_gb_s": rates.allocate / 1e9,
        "map_write_gb_s": rates.map_write / 1e9,
        "map_gb_s": rates.map / 1e9,
        "clear_gb_s": rates.clear / 1e9,
        "unmap_gb_s": rates.unmap / 1e9,
    }


def cards(sys: Path = SYS) -> Measured:
    """The network cards of this computer: the fastest ones are for training, the fastest of the others for management.

    Virtual interfaces are left out. If no driver reports a speed, nothing is known.
    """
    from agent.monitor.network.infiniband_ports import ACTIVE, ports

    rates = [port.rate / 1e9 for port in ports(sys).values() if port.state == ACTIVE and port.rate]
    others = [speed / 1000 for speed in _speeds(sys)]
    fast = rates or others
    if not fast:
        return {}
    fastest, count = max(Counter(fast).items())
    slower = [speed for speed in others if speed < fastest]
    return {"cards": count, "card_gbit_s": fastest, "management_gbit_s": max(slower, default=0.0)}


def _speeds(sys: Path) -> list[int]:
    """Speeds of the network cards with a device, Mbit/s; a driver without a speed gives an error, or -1."""
    found = []
    for path in sorted(sys.glob("class/net/*/device")):
        try:
            speed = int((path.parent / "speed").read_text())
        except (OSError, ValueError):
            continue
        if speed > 0:
            found.append(speed)
    return found


def _gpu() -> Measured:
    """The rates of one GPU; without a GPU, the state is in the host's memory."""
    import torch

    if not torch.cuda.is_available():
        return {"device_gb_s": 0.0}
    from everstep.training.copies.cuda import TorchCuda

    cuda, size = TorchCuda(), MOST_BYTES
    with tempfile.TemporaryFile(dir=SHM) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        mapped = mmap.mmap(file.fileno(), size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        there = torch.empty(size, dtype=torch.uint8, device="cuda")
        here = torch.frombuffer(mapped, dtype=torch.uint8)
        pinned = _rate(size, lambda: _checked(cuda.register(address, size)))
        copied = max(_rate(size, lambda: _copy(torch, here, there)) for _ in range(ROUNDS))
        unpinned = _rate(size, lambda: _checked(cuda.unregister(address)))
    return {"device_gb_s": copied, "pin_gb_s": pinned, "unpin_gb_s": unpinned}


def _rate(size: int, work: Callable[[], object]) -> float:
    """GB per second of a piece of work."""
    began = time.perf_counter()
    work()
    return size / (time.perf_counter() - began) / 1e9


def _copy(torch: Any, here: Any, there: Any) -> None:
    here.copy_(there, non_blocking=True)
    torch.cuda.synchronize()


def _checked(code: int) -> None:
    if code:
        raise OSError(f"CUDA cannot pin shared memory (error {code}): raise the limit of locked memory (ulimit -l)")
