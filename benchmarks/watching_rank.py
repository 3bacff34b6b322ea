"""The script of ``benchmarks/watching.py``: steps with collectives, in blocks by turns with another copy of it.

    watching_rank.py FOLDER SIDE PAIRS STEPS

Under everstep ``SIDE`` is ``with``: it reports its steps. Else it is ``without``, and nothing of everstep is imported.
Whose turn it is stands in ``FOLDER/turn``. Writes the seconds of every step to ``FOLDER/SIDE-<rank>.json``, block by
block: by the wall clock, and of CPU time of all threads of this process.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, ROWS = 384, 4, 96
"""Of the model: a step of it takes some 20 ms of one core (ours)."""
LOOK_S = 0.002
"""Between two looks whose turn it is (ours)."""


class Turn:
    """Whose turn it is: a number that both sides see. Block n is that of one side, block n + 1 that of the other."""

    def __init__(self, folder: Path, side: str) -> None:
        with (folder / "turn").open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)
        self._ours = int(side == "without")

    def wait(self, pair: int) -> None:
        """Until it is this side's turn: first in every other pair, so that nobody always is."""
        while int.from_bytes(self._map[:], "little") < 2 * pair + (self._ours ^ (pair % 2)):
            time.sleep(LOOK_S)

    def over(self) -> None:
        """It is the other side's turn."""
        self._map[:] = (int.from_bytes(self._map[:], "little") + 1).to_bytes(8, "little")


def train() -> Iterator[float]:
    """A loss after each step: forward, backward, an all-reduce of each gradient, optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(ROWS, WIDTH)
    while True:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for gradient in (parameter.grad for parameter in model.parameters()):
            assert gradient is not None
            dist.all_reduce(gradient)
        optimizer.step()
        yield float(loss.item())


def main() -> None:
    """Step whenever it is this side's turn."""
    folder, side, pairs, length = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, turn, losses = dist.get_rank(), Turn(folder, side), train()
    steps, report = _loop(side, pairs * length)
    wall: list[list[float]] = []
    cpu: list[list[float]] = []
    for step in steps:
        if step % length == 0:
            turn.wait(step // length)
            wall.append([])
            cpu.append([])
            at_s, used_s = time.perf_counter(), time.process_time()
        report(step, next(losses))
        now_s, now_used_s = time.perf_counter(), time.process_time()
        wall[-1].append(now_s - at_s)
        cpu[-1].append(now_used_s - used_s)
        at_s, used_s = now_s, now_used_s
        if step % length == length - 1:
            dist.barrier()
            if rank == 0:
                turn.over()
    (folder / f"{side}-{rank}.json").write_text(json.dumps({"wall": wall, "cpu": cpu}))
    dist.barrier()
    dist.destroy_process_group()


def _loop(side: str, count: int) -> tuple[Iterable[int], Callable[[int, float], None]]:
    """The loop of the training, and what reports a step."""
    if side == "without":
        return range(count), lambda step, loss: None
    import everstep

    run = everstep.join()
    return run.steps(count), lambda step, loss: run.report(step, loss=loss, tokens=ROWS)


if __name__ == "__main__":
    main()
