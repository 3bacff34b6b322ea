"""The script of ``benchmarks/watching.py``: makes blocks of steps with collectives, in turn with another copy of
itself.

    watching_rank.py FOLDER SIDE PAIRS STEPS

Under everstep ``SIDE`` is ``with``: the script reports its steps, and makes an unreported step before or after each of
them. Without everstep ``SIDE`` is ``without``, and nothing of everstep is imported. ``FOLDER/turn`` has the number of
the turn. The script writes the seconds of every step to ``FOLDER/SIDE-<rank>.json``, block by block: those by the wall
clock, and the CPU time of all threads. ``own`` has the CPU time of everstep's calls.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as HOOKS  # noqa: N812

WIDTH, LAYERS, ROWS = 512, 4, 192
"""Sizes of the model: a step takes about 30 ms of one core."""
POLL_S = 0.002
"""Time between two checks of the turn, seconds."""


class Turn:
    """The number of the turn, which both sides share. Of each pair of turns, one belongs to each side."""

    def __init__(self, folder: Path, side: str, rank: int) -> None:
        with (folder / "turn").open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)
        self._ours, self._rank = int(side == "without"), rank

    def wait(self, pair: int) -> None:
        """Wait until it is this side's turn; each side is first in every second pair."""
        while int.from_bytes(self._map[:], "little") < 2 * pair + (self._ours ^ (pair % 2)):
            time.sleep(POLL_S)

    def over(self) -> None:
        """Pass the turn to the other side once both ranks are done."""
        dist.barrier()
        if self._rank == 0:
            self._pass_on()

    def _pass_on(self) -> None:
        self._map[:] = (int.from_bytes(self._map[:], "little") + 1).to_bytes(8, "little")


def train() -> Iterator[float]:
    """Make steps with an all-reduce of each gradient; yields the loss after each step."""
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


class Clock:
    """Seconds of each step of one kind, block by block."""

    def __init__(self) -> None:
        self.wall: list[list[float]] = []
        self.cpu: list[list[float]] = []
        self._at = (0.0, 0.0)

    def begin(self, *, block: bool) -> None:
        """Begin a step; ``block``: it is the first step of a block."""
        if block:
            self.wall.append([])
            self.cpu.append([])
        self._at = (time.perf_counter(), time.process_time())

    def end(self) -> None:
        """End the step."""
        self.wall[-1].append(time.perf_counter() - self._at[0])
        self.cpu[-1].append(time.process_time() - self._at[1])


def plain(losses: Iterator[float], turn: Turn, pairs: int, length: int) -> dict[str, object]:
    """Make steps without everstep; returns their times."""
    clock = Clock()
    for step in range(pairs * length):
        if step % length == 0:
            turn.wait(step // length)
        clock.begin(block=step % length == 0)
        next(losses)
        clock.end()
        if step % length == length - 1:
            turn.over()
    return {"wall": clock.wall, "cpu": clock.cpu}


def watched(losses: Iterator[float], turn: Turn, pairs: int, length: int, threads: Sequence[int]) -> dict[str, object]:
    """Make steps with everstep, and for each of them a step that is not reported; return the times of both."""
    import everstep

    assert threads, "torch's server runs"
    run = everstep.join()
    clock, bare = Clock(), Clock()
    own: list[float] = []
    began_s, used_s = time.perf_counter(), cpu_of(threads)
    steps = iter(run.steps(pairs * length))
    for number in range(pairs * length):
        at, first = number % length, number % length == 0
        if first:
            turn.wait(number // length)
        if at % 2:
            unreported(losses, bare, block=False)
        clock.begin(block=first)
        marks = [time.thread_time()]
        step = next(steps)
        marks.append(time.thread_time())
        loss = next(losses)
        marks.append(time.thread_time())
        run.report(step, loss=loss, tokens=ROWS)
        marks.append(time.thread_time())
        clock.end()
        own.append(marks[1] - marks[0] + marks[3] - marks[2])
        if not at % 2:
            unreported(losses, bare, block=first)
        if at == length - 1:
            turn.over()
    for _ in steps:
        raise AssertionError("the loop has more steps than the blocks need")
    share = (cpu_of(threads) - used_s) / (time.perf_counter() - began_s)
    found = {"wall": clock.wall, "cpu": clock.cpu, "bare_wall": bare.wall, "bare_cpu": bare.cpu}
    return {**found, "own": own, "server": share}


def unreported(losses: Iterator[float], clock: Clock, *, block: bool) -> None:
    """Make one step without everstep's hooks of optimizers."""
    hooks = dict(HOOKS)
    HOOKS.clear()
    clock.begin(block=block)
    next(losses)
    clock.end()
    HOOKS.update(hooks)


def cpu_of(threads: Sequence[int]) -> float:
    """Return the CPU seconds that threads of this process have used."""
    return sum(int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) for thread in threads) / 1e9


def main() -> None:
    """Step whenever it is this side's turn."""
    folder, side, pairs, length = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    # Under everstep, the only other threads so far are those of torch's server.
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    turn, losses = Turn(folder, side, dist.get_rank()), train()
    is_watched = side == "with"
    found = watched(losses, turn, pairs, length, threads) if is_watched else plain(losses, turn, pairs, length)
    (folder / f"{side}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
