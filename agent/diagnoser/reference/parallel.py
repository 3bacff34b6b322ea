"""The reference model's ranks: which of them share a layer, a pipeline, or weights, and how they exchange tensors.

Tensors cross from rank to rank through gloo, in main memory, on GPUs too: gloo adds in an order that depends on nothing
but the number of ranks and the tensor's size, so what is compared is what the processors and GPUs computed.
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
    """One rank's place."""

    inner: int
    stage: int
    replica: int
    inner_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    """All ranks of the stage with the same weights outside the experts, where there are any."""
    before: int
    """Rank of the stage before; -1: this is the first stage."""
    after: int
    """Rank of the next stage; -1: this is the last stage."""

    @classmethod
    def of(cls, rank: int, limits: ReferenceLimits) -> Mesh:
        """The place of a rank; all ranks have to ask for theirs, for groups are made."""
        inner, dp, pp = limits.inner, limits.dp, limits.pp

        def at(stage: int, replica: int, place: int) -> int:
            return (stage * dp + replica) * inner + place

        mine = rank // (inner * dp), rank // inner % dp, rank % inner

        def group(members: list[list[int]]) -> dist.ProcessGroup:
            made = [dist.new_group(ranks) for ranks in members]
            own = next(group for group, ranks in zip(made, members, strict=True) if rank in ranks)
            assert isinstance(own, dist.ProcessGroup)  # what others get is a number
            return own

        stages, replicas, places = range(pp), range(dp), range(inner)
        stage, replica, place = mine
        return cls(
            place,
            stage,
            replica,
            group([[at(s, r, p) for p in places] for s in stages for r in replicas]),
            group([[at(s, r, p) for r in replicas] for s in stages for p in places]),
            group([[at(s, r, p) for r in replicas for p in places] for s in stages]),
            at(stage - 1, replica, place) if stage else -1,
            at(stage + 1, replica, place) if stage < pp - 1 else -1,
        )


def add_up(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over a group."""
    total = tensor.detach().to("cpu", copy=True).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(tensor.device)


def pass_on(tensor: Tensor, rank: int) -> None:
    """Send a tensor to a rank."""
    dist.send(tensor.detach().cpu().contiguous(), rank)


def take(like: Tensor, rank: int) -> Tensor:
    """Receive one from a rank."""
    came = torch.empty(like.shape, dtype=like.dtype)
    dist.recv(came, rank)
    return came.to(like.device)


class SplitInput(torch.autograd.Function):
    """Goes in as it is; the gradients of all ranks that share the layer are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the input."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The sum."""
        return add_up(grads[0], ctx.group), None


class AddedOutput(torch.autograd.Function):
    """What all ranks that share the layer computed is added; the gradient goes back as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The sum."""
        return add_up(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the output."""
        return grads[0], None


class Exchanged(torch.autograd.Function):
    """The first dimension is dealt out to the ranks of a group, as tokens to those who have their experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All-to-all."""
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """And back."""
        return _exchanged(grads[0], ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = x.detach().cpu().contiguous()
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    return came.to(x.device)
