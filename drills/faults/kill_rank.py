"""A rank gets a signal that ends it."""

from __future__ import annotations

from random import Random
from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from drills.faults.fault import RankFault
from drills.spec.fault import Entry, OnRanks
from everstep.model.job import JobSpec
from everstep.model.topology import Topology

Signal = Literal["KILL", "SEGV", "ABRT"]


class KillRank(OnRanks, RankFault):
    """One or several ranks are killed at once."""

    name = "kill-rank"
    summary = "a rank gets the signal; several at once"
    line = "SIG{signal} to {ranks}"
    action = "kill-rank"
    meets = "opening"

    signal: Signal = Field("KILL", description="The signal.")

    @field_validator("signal", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return value.upper().removeprefix("SIG") if isinstance(value, str) else value

    def details(self, spec: JobSpec) -> Entry:
        return {"signal": self.signal}

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw one or two ranks, and a signal."""
        count = min(rng.choice((1, 1, 2)), topology.world_size)
        return {"ranks": sorted(rng.sample(range(topology.world_size), count)), "signal": rng.choice(get_args(Signal))}
