"""A rank exits by itself."""

from __future__ import annotations

from pydantic import Field

from drills.faults.fault import RankFault
from drills.spec.fault import Entry, OnRanks
from everstep.model.job import JobSpec

CODES = (0, 1, 3)
"""Exit codes that a soak draws."""


class ExitRank(OnRanks, RankFault):
    """A rank exits in the middle of a step."""

    name = "exit-rank"
    summary = "os._exit(C) in the middle of a step, 0 included"
    line = "{ranks} leaves with code {code}"
    drawn = {"code": CODES}
    action = "exit-rank"
    meets = "opening"

    code: int = Field(1, ge=0, le=255, description="The exit code.", json_schema_extra={"metavar": "C"})

    def details(self, spec: JobSpec) -> Entry:
        return {"code": self.code}
