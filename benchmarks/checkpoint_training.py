"""The script of ``benchmarks/checkpoint_throughput.py``: makes busy steps. Blocks of steps with saves and blocks
without saves take turns.

    everstep's agent runs it:  checkpoint_training.py FOLDER MEGABYTES CALLS BLOCKS STEPS

A block without saves runs within a single body of the loop over ``run.steps``, so none of its steps is saved. Steps in
which work of the previous block may still run are not counted. The script writes the seconds of every step, block by
block, and the CPU seconds of the blocks to ``FOLDER/blocks-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

import everstep
from benchmarks.checkpoint_rank import Work

CALM = 2
"""Number of steps at the start of each block that are not counted: a copy and a backup of the previous block may
run."""


def main() -> None:
    """Train in blocks with and without saves."""
    folder, megabytes, calls, blocks, steps = sys.argv[1], *(int(one) for one in sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = Work(megabytes, calls)
    work.update()
    run = everstep.join()
    state = run.checkpoint(model=work.model, optimizer=work.optimizer)
    loss = torch.zeros(1)

    def train() -> float:
        work.compute()
        dist.all_reduce(loss)
        work.update()
        return time.perf_counter()

    def seconds(stamps: list[float]) -> list[float]:
        return [after - before for before, after in pairwise(stamps)]

    with_s: list[list[float]] = []
    without_s: list[list[float]] = []
    cpu = {"with": 0.0, "without": 0.0}
    length = CALM + steps
    stamps: list[float] = []
    used = 0.0
    for step in run.steps(blocks * length, state):
        at = step % length
        if at == 0:
            stamps = [train() for _ in range(CALM)][-1:]
            used = time.process_time()
            without_s.append(seconds(stamps + [train() for _ in range(steps)]))
            cpu["without"] += time.process_time() - used
        train()
        run.report(step, loss=1.0)
        if at == CALM - 1:
            stamps, used = [], time.process_time()
        stamps.append(time.perf_counter())
        if at == length - 1:
            with_s.append(seconds(stamps))
            cpu["with"] += time.process_time() - used
    found = {"with": with_s, "without": without_s, "cpu": cpu}
    Path(folder, f"blocks-{run.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
