"""User code raises an exception."""

from __future__ import annotations

from random import Random
from typing import Any

from pydantic import Field, field_validator

from drills.faults.fault import RankFault
from drills.spec.fault import Entry, OnRanks, ranks_in_words
from everstep.model.job import JobSpec
from everstep.model.topology import Topology
from everstep.rank.drill_faults import exception_named

EXCEPTIONS = ("ValueError", "RuntimeError", "IndexError")
"""Exceptions that a soak draws."""


class RaiseException(OnRanks, RankFault):
    """A rank raises an exception."""

    name = "raise"
    summary = "a Python exception in user code"
    action = "raise"
    meets = "opening"

    exception: str = Field("RuntimeError", description="A built-in exception.", json_schema_extra={"metavar": "NAME"})

    @field_validator("exception")
    @classmethod
    def _built_in(cls, value: str) -> str:
        exception_named(value)
        return value

    def describe(self, spec: JobSpec) -> str:
        """The ranks and the exception."""
        return f"{ranks_in_words(self.struck_ranks(spec))} raises {self.exception}"

    def details(self, spec: JobSpec) -> Entry:
        """The exception."""
        return {"exception": self.exception}

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """A rank and an exception."""
        return super().draw(rng, topology, alone=alone) | {"exception": rng.choice(EXCEPTIONS)}
