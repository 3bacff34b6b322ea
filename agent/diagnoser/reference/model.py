"""The reference model is a transformer of a few layers, which is split among ranks as in large jobs.

It uses only plain operations, because a fused operation may choose other kernels on another machine, and other kernels
give other bits. Weights and input are equal on every machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from agent.diagnoser.reference.parallel import AddedOutput, Exchanged, Mesh, SplitInput
from agent.diagnoser.reference.settings import ReferenceLimits

VOCABULARY = 256
SEED = 20250601


def weight(seed: int, *shape: int, scale: float = 1.0) -> nn.Parameter:
    """Make random weights that are equal on every machine."""
    generator = torch.Generator().manual_seed(SEED + seed)
    return nn.Parameter(torch.randn(*shape, generator=generator) * scale / math.sqrt(shape[-1]))


class ReferenceAttention(nn.Module):
    """Causal self-attention. With tensor parallelism, each rank has a share of the heads."""

    def __init__(self, limits: ReferenceLimits, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.mesh, self.split = mesh, not limits.moe and limits.tp > 1
        self.heads, self.width = (
            limits.heads // limits.inner if self.split else limits.heads,
            limits.dim // limits.heads,
        )
        share = self.heads * self.width
        part = mesh.inner if self.split else 0
        self.qkv = weight(seed + 100 * part, 3 * share, limits.dim)
        self.out = weight(seed + 100 * part + 1, limits.dim, share)

    def forward(self, x: Tensor) -> Tensor:
        """Convert (batch, sequence, dim) to the same shape."""
        batch, length, dim = x.shape
        if self.split:
            x = SplitInput.apply(x, self.mesh.inner_group)
        parts = (x @ self.qkv.t()).view(batch, length, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.width)
        ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ value
        out = mixed.transpose(1, 2).reshape(batch, length, -1) @ self.out.t()
        result: Tensor = AddedOutput.apply(out, self.mesh.inner_group) if self.split else out
        assert result.shape[-1] == dim
        return result


class ReferenceMlp(nn.Module):
    """The dense half of a layer: two matrices, of which the first is split by columns and the second by rows."""

    def __init__(self, limits: ReferenceLimits, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.mesh, self.split = mesh, limits.tp > 1
        share = 4 * limits.dim // limits.tp
        self.up = weight(seed + 100 * mesh.inner + 2, share, limits.dim)
        self.down = weight(seed + 100 * mesh.inner + 3, limits.dim, share)

    def forward(self, x: Tensor) -> Tensor:
        """Convert (…, dim) to the same shape."""
        if self.split:
            x = SplitInput.apply(x, self.mesh.inner_group)
        out = functional.gelu(x @ self.up.t()) @ self.down.t()
        result: Tensor = AddedOutput.apply(out, self.mesh.inner_group) if self.split else out
        return result


class ReferenceExperts(nn.Module):
    """The half of a layer with experts. Each token is sent to the rank that has its expert, and is sent back.

    The number of tokens of an expert is limited; tokens beyond this limit skip the experts.
    """

    def __init__(self, limits: ReferenceLimits, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.mesh, self.count, self.ranks = mesh, limits.experts, limits.ep
        self.own = limits.experts // limits.ep
        self.gate = weight(seed + 2, limits.experts, limits.dim)
        first = mesh.inner * self.own
        experts = range(first, first + self.own)
        self.up = nn.ParameterList(weight(seed + 10 * expert + 3, 2 * limits.dim, limits.dim) for expert in experts)
        self.down = nn.ParameterList(weight(seed + 10 * expert + 4, limits.dim, 2 * limits.dim) for expert in experts)

    def forward(self, x: Tensor) -> Tensor:
        """Convert (batch, sequence, dim) to the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        most = max(1, 2 * len(tokens) // self.count)
        shares = (tokens @ self.gate.t()).float().softmax(-1)
        share, expert = shares.max(-1)
        chosen = functional.one_hot(expert, self.count)
        position = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        fits = (position < most).to(tokens.dtype)
        slot = functional.one_hot(position.clamp(max=most - 1), most).to(tokens.dtype) * fits[:, None]
        dealt = torch.einsum("te,tc->tec", chosen.to(tokens.dtype), slot)
        sent = torch.einsum("tec,td->ecd", dealt, tokens)
        received = Exchanged.apply(sent, self.mesh.inner_group).view(self.ranks, self.own, most, -1)
        done = [
            functional.gelu(received[:, expert] @ self.up[expert].t()) @ self.down[expert].t()
            for expert in range(self.own)
        ]
        back = Exchanged.apply(torch.stack(done, 1).reshape(self.count, most, -1), self.mesh.inner_group)
        mixed = torch.einsum("tec,ecd->td", dealt, back) * share.to(tokens.dtype)[:, None]
        return mixed.view_as(x)


class ReferenceLayer(nn.Module):
    """A layer: attention, then the dense half or the experts."""

    def __init__(self, limits: ReferenceLimits, mesh: Mesh, seed: int) -> None:
        super().__init__()
        self.attention = ReferenceAttention(limits, mesh, seed)
        self.rest = ReferenceExperts(limits, mesh, seed) if limits.moe else ReferenceMlp(limits, mesh, seed)

    def forward(self, x: Tensor) -> Tensor:
        """Convert (batch, sequence, dim) to the same shape."""
        x = x + self.attention(functional.layer_norm(x, x.shape[-1:]))
        rest: Tensor = self.rest(functional.layer_norm(x, x.shape[-1:]))
        return x + rest


class ReferenceStage(nn.Module):
    """The part of the model on one rank: the layers of one pipeline stage."""

    def __init__(self, limits: ReferenceLimits, mesh: Mesh) -> None:
        super().__init__()
        own = limits.layers // limits.pp
        layers = range(mesh.stage * own, (mesh.stage + 1) * own)
        self.embedding = weight(1, VOCABULARY, limits.dim, scale=4.0) if mesh.before < 0 else None
        self.layers = nn.ModuleList(ReferenceLayer(limits, mesh, 10_000 * (1 + layer)) for layer in layers)
        self.head = weight(2, VOCABULARY, limits.dim) if mesh.after < 0 else None

    def forward(self, x: Tensor) -> Tensor:
        """Convert tokens, or the output of the previous stage, to the input of the next stage, or to scores."""
        if self.embedding is not None:
            x = functional.embedding(x, self.embedding)
        for layer in self.layers:
            x = layer(x)
        if self.head is not None:
            x = functional.layer_norm(x, x.shape[-1:]) @ self.head.t()
        return x

    def experts(self) -> set[nn.Parameter]:
        """Return the parameters of the experts, which only ranks with the same experts share."""
        parts = [module for module in self.modules() if isinstance(module, ReferenceExperts)]
        return {weight for module in parts for weight in (*module.up, *module.down)}


def batch_of(limits: ReferenceLimits, mesh: Mesh) -> Tensor:
    """Return the tokens of a replica: each sequence has one token more than the model reads at once.

    Ranks that share experts have different tokens.
    """
    number = mesh.replica * limits.inner + (mesh.inner if limits.moe else 0)
    generator = torch.Generator().manual_seed(SEED * 3 + number)
    return torch.randint(VOCABULARY, (limits.batch, limits.sequence + 1), generator=generator)
