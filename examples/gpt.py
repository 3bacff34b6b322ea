"""A small GPT with tensor, pipeline and data parallelism. everstep restarts it after faults.

The text is Python's own standard library, read as bytes; nothing is downloaded. The script runs on CPUs (gloo) and on
GPUs (nccl). It is deterministic: two runs with the same options print the same losses bit for bit, interrupted or not.

    python examples/gpt.py --steps 50
    torchrun --nproc-per-node 4 examples/gpt.py --tp 2 --pp 2 --steps 50
    everstep run --machines 4 --ranks-per-machine 2 --tp 2 --pp 2 -- examples/gpt.py --steps 300

The lines that everstep needs are marked "everstep:".
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this setting

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional

import everstep

VOCABULARY = 256
CORPUS_BYTES = 1 << 18


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the sources of Python's standard library.")
    parser.add_argument("--steps", type=int, default=100, help="steps of the complete job (default: %(default)s)")
    parser.add_argument("--tp", type=int, help="tensor-parallel size (default: the job's, outside everstep 1)")
    parser.add_argument("--pp", type=int, help="pipeline-parallel size (default: the job's, outside everstep 1)")
    parser.add_argument("--dim", type=int, default=64, help="width of the model (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per data-parallel rank (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, help="parts of a batch in the pipeline (default: pp)")
    parser.add_argument("--seq", type=int, default=64, help="bytes per sequence (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    lr_from: dict[str, Any] = {"nargs": 2, "type": float, "metavar": ("STEP", "RATE"), "default": []}
    parser.add_argument("--lr-from", action="append", help="step, and another rate from it on; repeatable", **lr_from)
    parser.add_argument("--dropout", type=float, default=0.1, help="share of values left out (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="limit of the gradient's norm (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and batches (default: %(default)s)")
    uneven: dict[str, Any] = {"nargs": 3, "type": int, "metavar": ("RANK", "STEP", "MS"), "default": []}
    parser.add_argument(
        "--uneven", action="append", help="from a step on, more work for a rank (-1: all ranks)", **uneven
    )
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each step takes at least this long")
    parser.add_argument(
        "--print-every", type=int, default=10, help="steps between lines of rank 0 (default: %(default)s)"
    )
    parser.add_argument("--losses", type=Path, help="file to which rank 0 appends step, loss and time as JSON lines")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    return parser.parse_args()


class Block(nn.Module):
    """One transformer block. Under tensor parallelism, a rank has its share of the heads and of the hidden width."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = dim // heads, dropout
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)  # rows ordered by head, so that a slice of rows is a set of heads
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute activations (batch, sequence, dim) from activations of the same shape."""
        batch, sequence, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, sequence, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self._some(self.out(attended.transpose(1, 2).reshape(batch, sequence, -1)))
        return x + self._some(self.down(functional.gelu(self.up(self.mlp_norm(x)))))

    def _some(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Stage(nn.Module):
    """The blocks of one pipeline stage; the first stage embeds, the last one predicts."""

    def __init__(self, args: argparse.Namespace, index: int, count: int) -> None:
        super().__init__()
        first, last = index == 0, index == count - 1
        per_stage = args.layers // count
        self.embed = nn.Embedding(VOCABULARY, args.dim) if first else None
        self.position = nn.Parameter(0.02 * torch.randn(args.seq, args.dim)) if first else None
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, args.dropout) for _ in range(per_stage))
        self.norm = nn.LayerNorm(args.dim) if last else None
        self.head = nn.Linear(args.dim, VOCABULARY) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute activations or logits from bytes, or from the activations of the previous stage."""
        if self.embed is not None and self.position is not None:
            x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


class Trainer:
    """A rank's part of the model, its optimizer and one step of training."""

    def __init__(self, args: argparse.Namespace, run: everstep.Run, device: torch.device) -> None:
        self.args, self.device = args, device
        self.world_size, self.topology, self.place = run.world_size, run.topology, run.coordinate
        self.first, self.last = self.place.pp == 0, self.place.pp == run.topology.pp - 1
        self.corpus = read_corpus() if self.first or self.last else torch.empty(0, dtype=torch.uint8)
        # All ranks of a stage make the same weights. torch.manual_seed would do too, but takes 5 ms at each restart.
        torch.default_generator.manual_seed(args.seed + self.place.pp)
        self.module = Stage(args, self.place.pp, run.topology.pp)
        self.sharded: set[str] = set()
        mesh = run.device_mesh(device.type) if run.world_size > 1 else None
        if mesh is not None and run.topology.tp > 1:
            self.sharded = split_tensors(self.module, mesh["tp"])
        self.module.to(device)
        self.model: nn.Module = self.module
        if mesh is not None and run.topology.dp > 1:
            self.model = nn.parallel.DistributedDataParallel(
                self.module, process_group=mesh.get_group("dp"), init_sync=False
            )
        self.schedule = self._pipeline(mesh) if mesh is not None and run.topology.pp > 1 else None
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=args.lr, fused=True)
        # everstep: it restores the random generators, so a resumed run drops out the same values as an undisturbed one.
        # The ranks of a tensor-parallel group must drop out the same values; those of a data-parallel group need not.
        on_cuda = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index or 0] if on_cuda else torch.default_generator
        generator.manual_seed((args.seed << 40) + (self.place.pp << 20) + self.place.dp)

    def step(self, step: int) -> tuple[float, float]:
        """One step; returns the loss and the gradient's norm, the same numbers on every rank."""
        loss = self.forward_backward(step)
        grads = [(name in self.sharded, p.grad) for name, p in self.module.named_parameters() if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for is_sharded in (True, False):
            if part := [grad for sharded, grad in grads if sharded == is_sharded]:
                copies = self.topology.dp * (1 if is_sharded else self.topology.tp)
                squares += nn.utils.get_total_norm(part).double().square() / copies
        numbers = torch.stack((loss, squares))
        if self.world_size > 1:
            # everstep: all ranks meet here in every step, so none is ever more than one step ahead.
            dist.all_reduce(numbers)
        mean_loss, norm = numbers[0].item(), numbers[1].sqrt().item()
        if norm > self.args.clip:
            torch._foreach_mul_([grad for _, grad in grads], self.args.clip / norm)
        for group in self.optimizer.param_groups:  # a restored group has the rate of the step that saved it
            group["lr"] = learning_rate(self.args, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_loss, norm

    def forward_backward(self, step: int) -> Tensor:
        """Compute the gradients of one batch; return this rank's share of the mean loss."""
        share = torch.zeros((), dtype=torch.float64, device=self.device)
        inputs, targets = self._batch(step) if self.first or self.last else (None, None)
        losses: list[Tensor] = []
        if self.schedule is None:
            assert inputs is not None and targets is not None
            losses.append(loss_of(self.model(inputs), targets))
            losses[0].backward()  # type: ignore[no-untyped-call]
        elif self.first:
            self.schedule.step(inputs)
        elif self.last:
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step()
        if losses:
            share += torch.stack([loss.detach() for loss in losses]).double().mean()
        return share / (self.topology.tp * self.topology.dp)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of one step, and the bytes that follow them. They depend only on the step: no position is
        saved."""
        generator = torch.Generator().manual_seed((self.args.seed << 40) + (step << 12) + self.place.dp)
        starts = torch.randint(len(self.corpus) - self.args.seq, (self.args.batch, 1), generator=generator)
        text = self.corpus[starts + torch.arange(self.args.seq + 1)].long().to(self.device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def _pipeline(self, mesh: DeviceMesh) -> Any:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        parts = self.args.microbatches or self.topology.pp
        rows, width = self.args.batch // parts, (self.args.seq, self.args.dim)
        # The stages get examples of their inputs and outputs, so they need not exchange shapes in the first step.
        hidden = torch.empty(rows, *width, device=self.device, requires_grad=True)
        bytes_in = torch.zeros(rows, self.args.seq, dtype=torch.long, device=self.device)
        logits = torch.empty(rows, self.args.seq, VOCABULARY, device=self.device, requires_grad=True)
        stage = PipelineStage(
            self.model,
            self.place.pp,
            self.topology.pp,
            self.device,
            input_args=(bytes_in if self.first else hidden,),
            output_args=(logits if self.last else hidden,),
            group=mesh.get_group("pp"),
        )
        return ScheduleGPipe(stage, parts, loss_fn=loss_of)


class Forked(torch.autograd.Function):
    """Pass the same activations to every rank of a group; backward sums the gradients of these ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: D102
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """Sum the partial results of all ranks of a group; in backward, each rank gets the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: D102
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return grad, None


class Columns(ParallelStyle):
    """Split a linear layer by outputs: each rank computes some features of all inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        keep_share(module, "weight", 0, device_mesh)
        keep_share(module, "bias", 0, device_mesh)
        module.register_forward_pre_hook(lambda _, inputs: (Forked.apply(inputs[0], group),))
        return module


class Rows(ParallelStyle):
    """Split a linear layer by inputs: each rank computes a part of every output, then the parts are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        keep_share(module, "weight", 1, device_mesh)
        module.register_forward_hook(lambda _, __, output: Summed.apply(output, group))
        return module


def keep_share(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    """Replace a parameter by this rank's share along one dimension."""
    whole = getattr(module, name).detach()
    setattr(module, name, nn.Parameter(whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()))


def split_tensors(stage: Stage, mesh: DeviceMesh) -> set[str]:
    """Split every block over the tensor-parallel group; returns the names of the split parameters.

    The styles above go through torch's ``parallelize_module`` like torch's own
    ``ColwiseParallel`` and ``RowwiseParallel``, but keep plain tensors: for a
    model this small, DTensor's dispatch costs several times the arithmetic.
    """
    plan = {"qkv": Columns(), "out": Rows(), "up": Columns(), "down": Rows()}
    for block in stage.blocks:
        parallelize_module(block, mesh, plan)
    return {name for name, _ in stage.named_parameters() if plan.keys() & set(name.split("."))}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy per byte, in nats."""
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate of a step, as of the last change up to it; an update of the arguments may change it."""
    rate: float = args.lr
    for begin, other in args.lr_from:
        rate = other if begin <= step else rate
    return rate


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


def check(args: argparse.Namespace, run: everstep.Run) -> None:
    """Exit with a message if a size is not a multiple of the size that divides it."""
    parts = args.microbatches or run.topology.pp
    for what, size, by, count in (
        ("--layers", args.layers, "pp", run.topology.pp),
        ("--heads", args.heads, "tp", run.topology.tp),
        ("--dim", args.dim, "--heads", args.heads),
        ("--batch", args.batch, "--microbatches", parts),
    ):
        if size % count:
            raise SystemExit(f"gpt.py: {what} {size} is not a multiple of {by} {count}")


def main() -> None:
    """Train."""
    args = options()
    run = everstep.join(tp=args.tp, pp=args.pp)  # everstep: who this rank is
    check(args, run)
    device = choose_device(args, run)
    if run.world_size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
    trainer = Trainer(args, run, device)
    # everstep: the objects of the state. It is saved after every step, and restored when the loop is entered.
    state = run.checkpoint(model=trainer.module, optimizer=trainer.optimizer)
    # everstep: with three or more data-parallel ranks, DDP needs two iterations until its sums are in their final
    # order.
    warm_up = (lambda: trainer.forward_backward(0)) if run.topology.dp > 2 else None
    tokens = args.batch * args.seq if trainer.last and run.coordinate.tp == 0 else 0
    began = time.monotonic()
    for step in run.steps(args.steps, state, warm_up=warm_up):
        loss, norm = trainer.step(step)
        compute_more(args, run.rank, step)
        run.report(step, loss=loss, grad_norm=norm, tokens=tokens)
        if run.rank == 0:
            show(args, step, loss, norm)
        now = time.monotonic()
        time.sleep(max(0.0, began + args.step_seconds - now))
        began = max(now, began + args.step_seconds)
    if run.world_size > 1:
        dist.destroy_process_group()


def compute_more(args: argparse.Namespace, rank: int, step: int) -> None:
    """Use the additional CPU time that ``--uneven`` sets for this rank; this changes no result."""
    milliseconds = sum(ms for own, begin, ms in args.uneven if own in (rank, -1) and begin <= step)
    until = time.thread_time() + milliseconds / 1000
    while time.thread_time() < until:
        sum(range(1000))


def show(args: argparse.Namespace, step: int, loss: float, norm: float) -> None:
    """Print a step now and then; append every step to ``--losses``."""
    if step % args.print_every == 0 or step == args.steps - 1:
        print(f"step {step:5d}  loss {loss:.6f}  gradient norm {norm:.4f}", flush=True)
    if args.losses:
        with args.losses.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "time_ns": time.time_ns()}) + "\n")


if __name__ == "__main__":
    main()
