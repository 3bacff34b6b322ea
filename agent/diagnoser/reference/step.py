"""This module repeats one step of the reference model from the same weights, and computes digests of the results."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim.adamw import adamw

from agent.diagnoser.ranks import gpu_of
from agent.diagnoser.reference.model import ReferenceStage, batch_of
from agent.diagnoser.reference.parallel import Mesh, add_up, receive_from, send_to
from agent.diagnoser.reference.settings import ReferenceLimits
from everstep.rank import drill_faults as faults

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
"""Settings of AdamW, which are its defaults."""
LEAST_ROUNDS = 2
"""Smallest number of repetitions of the step."""


def before_cuda() -> None:
    """Make cuBLAS compute the same bits each time. This must be called before the process uses a GPU."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


class ReferenceRank:
    """One rank of the reference model.

    Args:
        rank: Number of the rank on the machine.
        limits: Settings of the model.
        machine: Name of the machine, for which a drill may have planned wrong bits.
    """

    def __init__(self, rank: int, limits: ReferenceLimits, machine: str) -> None:
        # use_deterministic_algorithms(True) has the same effect, but imports the compiler, which takes 1.7 s of CPU
        # time in each rank.
        torch.set_deterministic_debug_mode("error")
        torch.backends.cuda.matmul.allow_tf32 = False
        self.limits, self.device = limits, gpu_of(rank)
        self.mesh = Mesh.of(rank, limits)
        self.dtype: torch.dtype = getattr(torch, limits.dtype)
        self.stage = ReferenceStage(limits, self.mesh).to(self.device, self.dtype)
        self.experts = self.stage.experts()
        self.weights = [parameter.detach().clone() for parameter in self.stage.parameters()]
        self.batch = batch_of(limits, self.mesh).to(self.device)
        self._flip = faults.BitFlip.planned(machine) if rank == 0 else None

    def repeat(self) -> dict[str, Any]:
        """Repeat the step until the time is over; returns the usual digests, and the steps with other digests."""
        began, seen = time.monotonic(), list[tuple[str, str]]()
        while True:
            seen.append(self._step())
            over = len(seen) >= LEAST_ROUNDS and time.monotonic() - began >= self.limits.seconds
            if self._agreed(over):
                break
        # The most frequent result is taken as right. If several results are equally frequent, it is the first of them.
        usual, _ = Counter(seen).most_common(1)[0]
        odd = [number for number, digests in enumerate(seen, 1) if digests != usual]
        return {"gradients": usual[0], "parameters": usual[1], "rounds": len(seen), "odd": odd}

    def _agreed(self, over: bool) -> bool:
        """Return the decision of the first rank, so that all ranks end after the same step."""
        word = torch.tensor([int(over)])
        dist.broadcast(word, 0)
        return bool(word.item())

    def _step(self) -> tuple[str, str]:
        with torch.no_grad():
            for parameter, fixed in zip(self.stage.parameters(), self.weights, strict=True):
                parameter.copy_(fixed)
                parameter.grad = None
        self._forward_backward()
        parameters = [parameter for parameter in self.stage.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._flip is not None and self._flip.strikes():
            flip_bit(gradients[0])
        own = digest(gradients)
        for parameter in parameters:
            assert parameter.grad is not None
            shared = self.mesh.dp_group if parameter in self.experts or not self.limits.moe else self.mesh.data_group
            parameter.grad = add_up(parameter.grad, shared)
        first_adamw_step(parameters)
        return own, digest(parameters)

    def _forward_backward(self) -> None:
        """Run all microbatches forward, and then all of them backward, as in a pipeline."""
        mesh, limits = self.mesh, self.limits
        rows = limits.batch // limits.pp
        like = torch.empty(rows, limits.sequence, limits.dim, dtype=self.dtype, device=self.device)
        kept = []
        for part in torch.split(self.batch, rows):
            x = part[:, :-1] if mesh.before < 0 else receive_from(mesh.before, like).requires_grad_()
            out = self.stage(x)
            if mesh.after < 0:
                out = functional.cross_entropy(out.float().flatten(0, 1), part[:, 1:].flatten()) / limits.pp
            else:
                send_to(out, mesh.after)
            kept.append((x, out))
        for x, out in kept:
            # The gradient of this sum is exactly the received gradient. If the received gradient were an argument of
            # backward(), each rank would import sympy.
            (out if mesh.after < 0 else (out * receive_from(mesh.after, like)).sum()).backward()
            if mesh.before >= 0:
                assert x.grad is not None
                send_to(x.grad, mesh.before)


@torch.no_grad()
def first_adamw_step(parameters: Sequence[Tensor]) -> None:
    """Do the first step of AdamW, with the same bits as ``torch.optim.AdamW``.

    The class would import the compiler, so this calls the function ``adamw`` instead.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    means, squares = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    adamw(
        list(parameters),
        gradients,
        means,
        squares,
        [],
        [torch.zeros(()) for _ in parameters],
        foreach=False,
        fused=False,
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        eps=EPSILON,
        maximize=False,
    )


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a checksum of all bytes, in which 0.0 and -0.0 differ and equal NaNs are equal."""
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def flip_bit(tensor: Tensor) -> None:
    """Flip the lowest bit of the first number, for a drill; the change is too small to be seen in a loss."""
    bits = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    tensor.detach().view(-1).view(bits)[0] ^= 1
