"""This module arranges the ranks of the reference model in groups, and exchanges tensors between ranks.

The ranks of a group share a layer, a pipeline or weights. Tensors are exchanged through gloo in main memory, even if
the ranks use GPUs. The order in which gloo adds numbers depends only on the number of ranks and the size of the tensor,
so all differences come from the processors and GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agent.diagnoser.reference.settings import ReferenceLimits


@dataclass(frozen=True)
class Mesh:
    """The position of one rank, and its process groups."""

    inner: int
    stage: int
    replica: int
    inner_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    """All ranks of the stage, which have equal weights outside the experts."""
    before: int
    """Rank of the previous stage; -1: this is the first stage."""
    after: int
    """Rank of the next stage; -1: this is the last stage."""

    @classmethod
    def of(cls, rank: int, limits: ReferenceLimits) -> Mesh:
        """Return the position of a rank. All ranks have to call this, because it creates process groups."""
        inner, dp, pp = limits.inner, limits.dp, limits.pp

        def at(stage: int, replica: int, part: int) -> int:
            return (stage * dp + replica) * inner + part

        mine = rank // (inner * dp), rank // inner % dp, rank % inner

        def group(members: list[list[int]]) -> dist.ProcessGroup:
            made = [dist.new_group(ranks) for ranks in members]
            own = next(group for group, ranks in zip(made, members, strict=True) if rank in ranks)
            assert isinstance(own, dist.ProcessGroup)  # ranks outside a group get a number instead
            return own

        stages, replicas, parts = range(pp), range(dp), range(inner)
        stage, replica, part = mine
        return cls(
            part,
            stage,
            replica,
            group([[at(s, r, p) for p in parts] for s in stages for r in replicas]),
            group([[at(s, r, p) for r in replicas] for s in stages for p in parts]),
            group([[at(s, r, p) for r in replicas for p in parts] for s in stages]),
            at(stage - 1, replica, part) if stage else -1,
            at(stage + 1, replica, part) if stage < pp - 1 else -1,
        )


def add_up(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over a group."""
    total = tensor.detach().to("cpu", copy=True).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(tensor.device)


def send_to(tensor: Tensor, rank: int) -> None:
    """Send a tensor to a rank."""
    dist.send(tensor.detach().cpu().contiguous(), rank)


def receive_from(rank: int, like: Tensor) -> Tensor:
    """Receive a tensor with the shape, type and device of ``like`` from a rank."""
    received = torch.empty(like.shape, dtype=like.dtype)
    dist.recv(received, rank)
    return received.to(like.device)


class SplitInput(torch.autograd.Function):
    """Returns the input unchanged. The backward pass adds the gradients of all ranks that share the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the input."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients."""
        return add_up(grads[0], ctx.group), None


class AddedOutput(torch.autograd.Function):
    """Adds the outputs of all ranks that share the layer; the backward pass leaves the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of the outputs."""
        return add_up(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the output."""
        return grads[0], None


class Exchanged(torch.autograd.Function):
    """Distributes the first dimension among the ranks of a group (all-to-all), e.g. tokens to their experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the parts that the ranks of the group sent to this rank."""
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradients, exchanged in the same way."""
        return _exchanged(grads[0], ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = x.detach().cpu().contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.to(x.device)
