"""A DDP script with what usually breaks a resume: dropout, BatchNorm, a schedule, a shuffling sampler.

    python examples/ddp.py --steps 50
    torchrun --nproc-per-node 3 examples/ddp.py --steps 50
    everstep run --machines 3 --ranks-per-machine 1 -- examples/ddp.py --steps 300

The lines that everstep needs are marked "everstep:". ``examples/ddp_plain.py`` is a script that knows nothing of
everstep.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as Parallel
from torch.utils.data import DataLoader, Dataset, Sampler

import everstep

VOCABULARY = 256
CORPUS_BYTES = 1 << 16


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a next-byte model with DDP.")
    parser.add_argument("--steps", type=int, default=100, help="steps of the complete job (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank (default: %(default)s)")
    parser.add_argument("--context", type=int, default=16, help="bytes before the predicted one (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=64, help="width of the model (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at the start (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="steps in each optimizer step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, order, dropout (default: %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each step takes at least this long")
    parser.add_argument(
        "--print-every", type=int, default=10, help="steps between lines of rank 0 (default: %(default)s)"
    )
    parser.add_argument("--losses", type=Path, help="file to which rank 0 appends step, loss and time as JSON lines")
    return parser.parse_args()


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Contexts and their next bytes, from the standard library's modules."""

    def __init__(self, context: int) -> None:
        text = bytearray()
        for path in sorted(Path(os.__file__).parent.glob("*.py")):
            text += path.read_bytes()
            if len(text) >= CORPUS_BYTES:
                break
        self.text = torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return len(self.text) - self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.text[index : index + self.context + 1].long()
        return row[:-1], row[-1]


class Shuffled(Sampler[int]):
    """This rank's samples in an order that is shuffled anew in each epoch, for ever.

    everstep: the position in the data is part of the state, and is the same number on every rank. The iterator is made
    before the state is restored, so it reads the position only when the next sample is asked for.
    """

    def __init__(self, count: int, run: everstep.Run, seed: int) -> None:
        self.count, self.seed = count - count % run.world_size, seed
        self.rank, self.world_size = run.rank, run.world_size
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        epoch, order = -1, torch.empty(0)
        while True:
            if epoch != self.taken // self.count:
                epoch = self.taken // self.count
                order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + epoch))
            index = int(order[self.taken % self.count + self.rank])
            self.taken += self.world_size
            yield index

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position."""
        self.taken = state["taken"]


def build(args: argparse.Namespace) -> nn.Module:
    """Return a small network that predicts the next byte."""
    torch.manual_seed(args.seed)  # the same weights on every rank
    return nn.Sequential(
        nn.Embedding(VOCABULARY, args.dim),
        nn.Flatten(),
        nn.Linear(args.context * args.dim, 4 * args.dim),
        nn.BatchNorm1d(4 * args.dim),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(4 * args.dim, VOCABULARY),
    )


def main() -> None:
    """Train."""
    args = options()
    run = everstep.join(tp=1, pp=1)  # everstep: who this rank is
    torch.set_num_threads(1)  # the number of threads is part of the result's bits
    model = build(args)
    parallel: nn.Module = model
    if run.world_size > 1:
        dist.init_process_group("gloo")
        parallel = Parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    data = Text(args.context)
    sampler = Shuffled(len(data), run, args.seed)
    # everstep: the iterator is made before the loop, since it draws a seed from a generator that the loop restores.
    batches = iter(DataLoader(data, args.batch, sampler=sampler))
    torch.manual_seed(args.seed + 1 + run.rank)  # dropout differs from rank to rank

    def warm_up() -> None:
        """Run forward and backward once, without data of the job."""
        zeros = torch.zeros(args.batch, args.context, dtype=torch.long)
        parallel(zeros).sum().backward()

    # everstep: the objects of the state. It is saved after every step, and restored when the loop is entered.
    state = run.checkpoint(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler)
    began = time.monotonic()
    # everstep: with three or more ranks, DDP needs two iterations until its sums are in their final order.
    for step in run.steps(args.steps, state, warm_up=warm_up if run.world_size > 2 else None):
        inputs, targets = next(batches)
        # everstep: gradients that a body leaves for the optimizer.step() of a later body are part of the state.
        stepping = step % args.accumulate == args.accumulate - 1
        with parallel.no_sync() if isinstance(parallel, Parallel) and not stepping else contextlib.nullcontext():
            loss = functional.cross_entropy(parallel(inputs), targets)
            (loss / args.accumulate).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if stepping:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        mean = loss.detach() / run.world_size
        if run.world_size > 1:
            # everstep: all ranks meet here in every step, so none is ever more than one step ahead.
            dist.all_reduce(mean)
        run.report(step, loss=mean, grad_norm=norm, tokens=args.batch)
        if run.rank == 0:
            show(args, step, mean.item())
        now = time.monotonic()
        time.sleep(max(0.0, began + args.step_seconds - now))
        began = max(now, began + args.step_seconds)
    if run.world_size > 1:
        dist.destroy_process_group()


def show(args: argparse.Namespace, step: int, loss: float) -> None:
    """Print a step now and then; append every step to ``--losses``."""
    if step % args.print_every == 0 or step == args.steps - 1:
        print(f"step {step:5d}  loss {loss:.6f}", flush=True)
    if args.losses:
        with args.losses.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "time_ns": time.time_ns()}) + "\n")


if __name__ == "__main__":
    main()
