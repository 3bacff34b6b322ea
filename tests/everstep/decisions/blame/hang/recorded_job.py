"""The job that ``record_stacks.py`` records. It uses tensor, pipeline and data parallelism on gloo.

A chosen fault makes it hang. Its functions have names from large training frameworks, so that its stacks look like real
ones.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from everstep.model.topology import Topology

WIDTH, ROWS, PARTS = 32, 4, 4


@dataclass(frozen=True)
class Fault:
    """A fault in one step of a rank."""

    kind: str = ""
    rank: int = -1
    step: int = -1


HEALTHY = Fault()


class Tokens(Dataset[Tensor]):
    """The data of a rank. With the fault ``loader``, a read of row ``ends_at`` never returns."""

    def __init__(self, ends_at: int) -> None:
        self.ends_at = ends_at

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        if 0 <= self.ends_at <= index:
            read_remote_shard()
        return torch.full((ROWS, WIDTH), float(index % 7))


def read_remote_shard() -> None:
    read, _ = os.pipe()
    os.read(read, 1)


class SumOverGroup(torch.autograd.Function):
    """The sum over a tensor parallel group, in the forward and the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Layer(nn.Module):
    """A layer whose output is summed over the tensor parallel group."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.linear, self.group = nn.Linear(WIDTH, WIDTH), group

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = SumOverGroup.apply(self.linear(x).relu() / 8, self.group)
        return out


class Worker:
    """One rank of the job."""

    def __init__(self, rank: int, topology: Topology, fault: Fault, evaluate_every: int) -> None:
        self.rank, self.topology, self.evaluate_every = rank, topology, evaluate_every
        self.fault = fault if fault.rank in (rank, ALL) else Fault()
        self.place = topology.coordinate(rank)
        groups: Any = {kind: [dist.new_group(list(ranks)) for ranks in topology.groups(kind)] for kind in ("tp", "dp")}
        self.group = {kind: groups[kind][topology.groups(kind).index(topology.group(rank, kind))] for kind in groups}
        self.second_world: Any = dist.new_group()
        line = topology.group(rank, "pp")
        self.previous = line[self.place.pp - 1] if self.place.pp else None
        self.following = line[self.place.pp + 1] if self.place.pp + 1 < topology.pp else None
        self.first = Layer(self.group["tp"])
        self.model = nn.Sequential(self.first, Layer(self.group["tp"]))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        ends_at = self.fault.step * PARTS if self.fault.kind == "loader" else -1
        self.batches: Iterator[Tensor] | None = None
        if self.previous is None:
            self.batches = iter(DataLoader(Tokens(ends_at), batch_size=None, num_workers=1))

    def train(self, steps: int, done: Any) -> None:
        for step in range(steps):
            done[self.rank] = step
            self.train_step(step)
            if self.evaluate_every and step % self.evaluate_every == self.evaluate_every - 1:
                self.evaluate()

    def train_step(self, step: int) -> None:
        kind = self.fault.kind if step == self.fault.step else ""
        if kind in BEFORE:
            BEFORE[kind]()
        self.forward_backward_pipelining()
        if kind != "skip":
            self.allreduce_gradients()
        if kind == "order":
            self.two_sums()
        self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward_backward_pipelining(self) -> None:
        inputs, outputs, sent = [], [], []
        for _ in range(PARTS):
            inputs.append(self.recv_forward() if self.previous is not None else self.get_batch())
            outputs.append(self.forward_step(inputs[-1]))
            if self.following is not None:
                sent.append(dist.isend(outputs[-1].detach(), self.following))
        for part in range(PARTS):
            grad = self.recv_backward() if self.following is not None else None
            self.backward_step(outputs[part], grad)
            if self.previous is not None:
                sent.append(self.send_backward(inputs[part].grad))
        for work in sent:
            assert work is not None
            work.wait()

    def send_backward(self, grad: Tensor | None) -> Any:
        assert grad is not None
        return dist.isend(grad.contiguous(), self.previous)

    def get_batch(self) -> Tensor:
        assert self.batches is not None
        return next(self.batches)

    def forward_step(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out.square().mean() if self.following is None else out

    def backward_step(self, output: Tensor, grad: Tensor | None) -> None:
        output.backward(grad)  # type: ignore[no-untyped-call]

    def recv_forward(self) -> Tensor:
        x = torch.empty(ROWS, WIDTH)
        work = dist.irecv(x, self.previous)
        assert work is not None
        work.wait()
        return x.requires_grad_()

    def recv_backward(self) -> Tensor:
        grad = torch.empty(ROWS, WIDTH)
        work = dist.irecv(grad, self.following)
        assert work is not None
        work.wait()
        return grad

    def allreduce_gradients(self) -> None:
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        dist.all_reduce(flat, group=self.group["dp"])

    def clip_gradients(self) -> None:
        dist.all_reduce(torch.ones(2))

    def two_sums(self) -> None:
        """Call two collectives in different orders on even and odd ranks. This is a fault of the script."""
        groups: list[Any] = [None, self.second_world]
        for group in groups if self.rank % 2 else reversed(groups):
            dist.all_reduce(torch.ones(3), group=group)

    def evaluate(self) -> None:
        x = torch.ones(64 * ROWS, WIDTH)
        with torch.no_grad():
            for _ in range(400):
                x = torch.tanh(self.first.linear(x))
        dist.all_reduce(x.sum())


ALL = -2
"""The value of ``Fault.rank`` if all ranks have the fault."""


def deadlock() -> None:
    lock = threading.Lock()
    with lock:
        flush_metrics(lock)


def flush_metrics(lock: threading.Lock) -> None:
    with lock:
        pass


def match_for_ever() -> None:
    """Run for ever in C code that holds the GIL."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def hold_gil() -> None:
    ctypes.PyDLL(None).sleep(100_000)


def spin() -> None:
    count = 0
    while True:
        count += 1


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


BEFORE = {"deadlock": deadlock, "regex": match_for_ever, "gil": hold_gil, "spin": spin, "stop": stop}


def main(rank: int, topology: Topology, store: Any, fault: Fault, evaluate_every: int, done: Any) -> None:
    torch.set_num_threads(1)
    world = topology.world_size
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(hours=1))
    Worker(rank, topology, fault, evaluate_every).train(1_000_000, done)
