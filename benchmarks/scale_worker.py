"""Runs a worker as ``everstep worker`` does, and records the longest time for which its event loop was blocked.

``scale_worker.py FILE LEDGER``: FILE has two doubles, the longest time by the wall clock and the longest CPU time of
the loop, seconds. Other programs do not lengthen the CPU time. Another process may set both to 0 to begin again.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path

from controlplane.logging_setup import configure
from controlplane.worker import run_worker
from everstep.model.job_state import TASK_QUEUE

POLL_S = 0.005
"""Time between two measurements, seconds."""


async def watch(path: Path) -> None:
    """Measure again and again how much longer than requested a short sleep takes, and keep the largest values in the
    file."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 16) as longest:
        while True:
            began, busy = time.perf_counter(), time.thread_time()
            await asyncio.sleep(POLL_S)
            blocked = (time.perf_counter() - began - POLL_S, time.thread_time() - busy)
            longest[:16] = struct.pack("dd", *map(max, blocked, struct.unpack("dd", longest[:16])))


async def main() -> None:
    """Work until SIGTERM."""
    configure("worker")
    watching = asyncio.create_task(watch(Path(sys.argv[1])))
    await run_worker(ledger_url=sys.argv[2], task_queue=TASK_QUEUE)
    watching.cancel()


if __name__ == "__main__":
    asyncio.run(main())
