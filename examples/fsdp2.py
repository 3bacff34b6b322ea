"""A small GPT whose parameters, gradients and optimizer state are sharded over ranks by FSDP2.

They are sharded over all ranks, or with --replicas over the ranks of each replica (hybrid sharding). Each rank saves
its own shards; nothing is ever gathered. The batch of all ranks together is a function of the step, so the job may
continue from a checkpoint on disk with another number of ranks.

    python examples/fsdp2.py --steps 50
    torchrun --nproc-per-node 4 examples/fsdp2.py --steps 50
    everstep run --machines 2 --ranks-per-machine 2 -- examples/fsdp2.py --steps 300
    everstep run --machines 4 --mesh dp_replicate=2,dp_shard=2 -- examples/fsdp2.py --replicas 2 --steps 300

The lines that everstep needs are marked "everstep:".
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this setting

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import everstep

VOCABULARY = 256
CORPUS_BYTES = 1 << 18


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the sources of Python's standard library.")
    parser.add_argument("--steps", type=int, default=100, help="steps of the complete job (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=64, help="width of the model (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of all ranks in a step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="bytes per sequence (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="limit of the gradient's norm (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="share of values left out (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, batches, dropout (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="replicas of the sharded model (default: %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each step takes at least this long")
    parser.add_argument(
        "--print-every", type=int, default=10, help="steps between lines of rank 0 (default: %(default)s)"
    )
    parser.add_argument("--losses", type=Path, help="file to which rank 0 appends step, loss and time as JSON lines")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    return parser.parse_args()


class Model(nn.Module):
    """Predicts the next byte at every place of a sequence."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, args.dim)
        self.position = nn.Parameter(0.02 * torch.randn(args.seq, args.dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                args.dim, args.heads, 4 * args.dim, args.dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(args.seq), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (batch, sequence, 256) from bytes (batch, sequence)."""
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        out: Tensor = self.head(self.norm(x))
        return out


class Trainer:
    """A rank's shards of the model, its optimizer and one step of training."""

    def __init__(self, args: argparse.Namespace, run: everstep.Run, device: torch.device) -> None:
        self.args, self.run, self.device = args, run, device
        self.corpus = read_corpus()
        torch.manual_seed(args.seed)  # all ranks make the same weights, and keep their shards
        self.model = Model(args).to(device)
        if run.world_size > 1:
            mesh = run.device_mesh(device.type)
            mesh = mesh if args.replicas > 1 else mesh["dp"]
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        torch.manual_seed(args.seed + 1 + run.rank)  # dropout differs from rank to rank

    def step(self, step: int) -> tuple[float, float]:
        """One step; returns the loss and the gradient's norm, the same numbers on every rank."""
        inputs, targets = self._batch(step)
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        mean = loss.detach() / self.run.world_size
        if self.run.world_size > 1:
            norm = norm.full_tensor()  # type: ignore[attr-defined]
            # everstep: all ranks meet here in every step, so none is ever more than one step ahead.
            dist.all_reduce(mean)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean.item(), norm.item()

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's sequences of a step, and for each byte the byte that follows it."""
        generator = torch.Generator().manual_seed((self.args.seed << 40) + step)
        starts = torch.randint(len(self.corpus) - self.args.seq, (self.args.batch, 1), generator=generator)
        mine = starts.chunk(self.run.world_size)[self.run.rank]
        text = self.corpus[mine + torch.arange(self.args.seq + 1)].long().to(self.device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def read_corpus() -> Tensor:
    """Return the first quarter of a MiB of the standard library's modules, in the order of their names."""
    folder = Path(os.__file__).parent
    text = bytearray()
    for name in sorted(path.name for path in folder.iterdir() if path.suffix == ".py"):
        text += (folder / name).read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def choose_device(args: argparse.Namespace, run: everstep.Run) -> torch.device:
    """Choose this rank's own GPU if every rank of the machine has one, else the CPU."""
    enough = args.device == "cuda" or torch.cuda.device_count() >= run.topology.ranks_per_machine
    if args.device != "cpu" and torch.cuda.is_available() and enough:
        torch.cuda.set_device(run.local_rank)
        torch.use_deterministic_algorithms(True)
        return torch.device("cuda", run.local_rank)
    torch.set_num_threads(1)  # the number of threads is part of the result's bits
    return torch.device("cpu")


def main() -> None:
    """Train."""
    args = options()
    hybrid = {"dp_replicate": args.replicas, "dp_shard": -1}
    run = everstep.join(mesh=hybrid) if args.replicas > 1 else everstep.join(tp=1, pp=1)  # everstep: who this rank is
    if args.batch % run.world_size:
        raise SystemExit(f"fsdp2.py: --batch {args.batch} is not a multiple of the {run.world_size} ranks")
    device = choose_device(args, run)
    if run.world_size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
    trainer = Trainer(args, run, device)
    # everstep: the objects of the state. It is saved after every step, and restored when the loop is entered.
    state = run.checkpoint(model=trainer.model, optimizer=trainer.optimizer)
    began = time.monotonic()
    for step in run.steps(args.steps, state):
        loss, norm = trainer.step(step)
        run.report(step, loss=loss, grad_norm=norm, tokens=args.batch * args.seq // run.world_size)
        if run.rank == 0:
            show(args, step, loss, norm)
        now = time.monotonic()
        time.sleep(max(0.0, began + args.step_seconds - now))
        began = max(now, began + args.step_seconds)
    if run.world_size > 1:
        dist.destroy_process_group()


def show(args: argparse.Namespace, step: int, loss: float, norm: float) -> None:
    """Print a step now and then; append every step to ``--losses``."""
    if step % args.print_every == 0 or step == args.steps - 1:
        print(f"step {step:5d}  loss {loss:.6f}  gradient norm {norm:.4f}", flush=True)
    if args.losses:
        with args.losses.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "time_ns": time.time_ns()}) + "\n")


if __name__ == "__main__":
    main()
