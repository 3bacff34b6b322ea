"""An ordinary DDP script that knows nothing of everstep.

It reads torchrun's environment, writes a checkpoint every few steps, and continues from the newest one. everstep can
restart it after a crash nevertheless:

    torchrun --nproc-per-node 2 examples/ddp_plain.py --out /tmp/plain
    everstep run --machines 2 --ranks-per-machine 1 -- examples/ddp_plain.py --out /tmp/plain
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a next-byte model with DDP and checkpoints of its own.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint.pt and losses.jsonl")
    parser.add_argument("--steps", type=int, default=100, help="steps in all (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank (default: %(default)s)")
    parser.add_argument("--context", type=int, default=16, help="bytes before the predicted one (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=64, help="width of the model (default: %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each step takes at least this long")
    return parser.parse_args()


def build(args: argparse.Namespace) -> nn.Module:
    """Return a small network that predicts the next byte."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, args.dim),
        nn.Flatten(),
        nn.Linear(args.context * args.dim, 4 * args.dim),
        nn.GELU(),
        nn.Linear(4 * args.dim, VOCABULARY),
    )


def batch(text: Tensor, args: argparse.Namespace, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return contexts and their next bytes, chosen by step and rank."""
    generator = torch.Generator().manual_seed(step * 4096 + rank)
    starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
    rows = text[starts + torch.arange(args.context + 1)].long()
    return rows[:, :-1], rows[:, -1]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint; after a crash meanwhile, the previous one still exists."""
    temporary = path.with_suffix(".new")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    temporary.rename(path)


def main() -> None:
    """Train."""
    args = options()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8)
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint, first = args.out / "checkpoint.pt", 0
    if checkpoint.exists():
        found = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
        if rank == 0:
            print(f"going on from step {first}", flush=True)
    dist.barrier()  # no rank writes a checkpoint before all ranks have read it
    parallel = nn.parallel.DistributedDataParallel(model)
    for step in range(first, args.steps):
        began = time.monotonic()
        inputs, targets = batch(text, args, step, rank)
        loss = functional.cross_entropy(parallel(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            with (args.out / "losses.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": mean.item(), "time_ns": time.time_ns()}) + "\n")
            if step % args.every == 0:
                print(f"step {step:5d}  loss {mean.item():.6f}", flush=True)
            if (step + 1) % args.every == 0:
                save(checkpoint, step + 1, model, optimizer)
        time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
