"""A worker as ``everstep worker`` runs it, that writes down the longest time for which its event loop was held.

``scale_worker.py FILE LEDGER``: FILE has two doubles, seconds by the clock and of the loop's own CPU, which others on
the computer do not lengthen; whoever sets them to 0 begins anew.
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

LOOK_S = 0.005


async def watch(path: Path) -> None:
    """Look at the clock again and again."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 16) as longest:
        while True:
            began, busy = time.perf_counter(), time.thread_time()
            await asyncio.sleep(LOOK_S)
            held = (time.perf_counter() - began - LOOK_S, time.thread_time() - busy)
            known = struct.unpack("dd", longest[:16])
            longest[:16] = struct.pack("dd", *map(max, held, known))


async def main() -> None:
    """Work until SIGTERM."""
    configure("worker")
    watching = asyncio.create_task(watch(Path(sys.argv[1])))
    await run_worker(ledger_url=sys.argv[2], task_queue=TASK_QUEUE)
    watching.cancel()


if __name__ == "__main__":
    asyncio.run(main())
