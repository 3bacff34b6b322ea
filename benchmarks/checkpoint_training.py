"""The script of ``benchmarks/checkpoint_throughput.py``: busy steps with and without saves, in blocks by turns.

    everstep's agent runs it:  checkpoint_training.py FOLDER MEGABYTES CALLS BLOCKS STEPS

A block without saves lies within one body of ``run.steps``, so that the loop is one that a user could have. Steps
that still carry something of the block before are not counted. Writes the seconds of every block to
``FOLDER/blocks-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import everstep
from benchmarks.checkpoint_rank import Work

CALM = 2
"""Steps between blocks that are not counted: a copy and a backup may still be under way (ours)."""


def main() -> None:
    """Train, by turns."""
    folder, megabytes, calls, blocks, steps = sys.argv[1], *(int(one) for one in sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = Work(megabytes, calls)
    work.update()
    run = everstep.join()
    state = run.checkpoint(model=work.model, optimizer=work.optimizer)
    loss = torch.zeros(1)

    def train(count: int) -> None:
        for _ in range(count):
            work.compute()
            dist.all_reduce(loss)
            work.update()

    found: dict[str, list[float]] = {"with": [], "without": [], "cpu with": [], "cpu without": []}
    length = CALM + steps
    began = used = 0.0
    for step in run.steps(blocks * length, state):
        at = step % length
        if at == 0:
            train(CALM)
            began, used = time.perf_counter(), time.process_time()
            train(steps)
            found["without"].append(time.perf_counter() - began)
            found["cpu without"].append(time.process_time() - used)
        train(1)
        run.report(step, loss=1.0)
        if at == CALM - 1:
            began, used = time.perf_counter(), time.process_time()
        elif at == length - 1:
            found["with"].append(time.perf_counter() - began)
            found["cpu with"].append(time.process_time() - used)
    Path(folder, f"blocks-{run.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
