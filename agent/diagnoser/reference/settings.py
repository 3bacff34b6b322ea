"""This module has the settings of the reference model: its size and structure."""

from __future__ import annotations

from pydantic import Field, model_validator

from agent.diagnoser.diagnostic import DiagnosticLimits

DTYPES = ("float32", "bfloat16", "float16")


class ReferenceLimits(DiagnosticLimits):
    """Settings of the bitwise test. The model has the job's structure, but a size of its own."""

    seconds: float = Field(default=5.0, ge=0)
    """The step is repeated for this long, seconds, and at least twice, since a fault may not show each time."""
    tp: int = Field(default=2, ge=1)
    """Tensor-parallel size (ByteRobust, section 4.2, has TP2·PP2·DP2, or EP2·PP2·DP2)."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel size."""
    pp: int = Field(default=2, ge=1)
    """Pipeline-parallel size."""
    dp: int = Field(default=2, ge=1)
    """Data-parallel size."""
    moe: bool = False
    """Whether layers have experts, which ``ep`` splits; without experts, ``tp`` splits the layers."""
    dtype: str = "bfloat16"
    """Type of numbers: ``float32``, ``bfloat16`` or ``float16``."""
    dim: int = Field(default=128, ge=8)
    """Width of the model."""
    heads: int = Field(default=4, ge=1)
    layers: int = Field(default=4, ge=1)
    experts: int = Field(default=4, ge=1)
    batch: int = Field(default=4, ge=1)
    sequence: int = Field(default=32, ge=2)
    answer_s: float = Field(default=20.0, gt=0)
    """Longest wait of a process for another process, seconds."""

    @property
    def inner(self) -> int:
        """Number of ranks that share a layer."""
        return self.ep if self.moe else self.tp

    @property
    def world_size(self) -> int:
        """Number of ranks on each machine."""
        return self.inner * self.pp * self.dp

    @model_validator(mode="after")
    def _fits(self) -> ReferenceLimits:
        wrong = [
            text
            for fits, text in (
                (self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}"),
                (not (self.moe and self.tp > 1 and self.ep > 1), "a model with experts is split by ep: leave tp at 1"),
                (self.dim % self.heads == 0, "dim must be a multiple of heads"),
                (self.moe or self.heads % self.tp == 0, "heads must be a multiple of tp"),
                (self.layers % self.pp == 0, "layers must be a multiple of pp"),
                (not self.moe or self.experts % self.ep == 0, "experts must be a multiple of ep"),
                (self.batch % self.pp == 0, "batch must be a multiple of pp: it has a microbatch for each stage"),
            )
            if not fits
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self
