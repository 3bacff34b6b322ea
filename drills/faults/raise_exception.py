"""User code raises an exception."""

from __future__ import annotations

from pydantic import Field, field_validator

from drills.faults.fault import RankFault
from drills.spec.fault import Entry, OnRanks
from everstep.model.job import JobSpec
from everstep.rank.drill_faults import exception_named

EXCEPTIONS = ("ValueError", "RuntimeError", "IndexError")
"""Exceptions that a soak draws."""


class RaiseException(OnRanks, RankFault):
    """A rank raises an exception."""

    name = "raise"
    summary = "a Python exception in user code"
    line = "{ranks} raises {exception}"
    drawn = {"exception": EXCEPTIONS}
    action = "raise"
    meets = "opening"

    exception: str = Field("RuntimeError", description="A built-in exception.", json_schema_extra={"metavar": "NAME"})

    @field_validator("exception")
    @classmethod
    def _built_in(cls, value: str) -> str:
        exception_named(value)
        return value

    def details(self, spec: JobSpec) -> Entry:
        return {"exception": self.exception}
