"""A rank leaves by itself."""

from __future__ import annotations

from random import Random
from typing import Any

from pydantic import Field

from drills.faults.fault import RankFault
from drills.spec.fault import Entry, OnRanks, ranks_in_words
from everstep.model.job import JobSpec
from everstep.model.topology import Topology

CODES = (0, 1, 3)
"""Exit codes that a soak draws."""


class ExitRank(OnRanks, RankFault):
    """A rank exits in the middle of a step."""

    name = "exit-rank"
    summary = "os._exit(C) in the middle of a step, 0 included"
    action = "exit-rank"
    meets = "opening"

    code: int = Field(1, ge=0, le=255, description="The exit code.", json_schema_extra={"metavar": "C"})

    def describe(self, spec: JobSpec) -> str:
        """The ranks and the code."""
        return f"{ranks_in_words(self.struck_ranks(spec))} leaves with code {self.code}"

    def details(self, spec: JobSpec) -> Entry:
        """The code."""
        return {"code": self.code}

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """A rank and a code."""
        return super().draw(rng, topology, alone=alone) | {"code": rng.choice(CODES)}
