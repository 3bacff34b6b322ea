"""Where an incident stands now, as it answers to the query ``stage``."""

from __future__ import annotations

from pydantic import Field

from everstep.model.eviction import Eviction
from everstep.model.stage_record import StageRecord


class StageAtHand(StageRecord):
    """The stage at hand, with what somebody has to be told of it. Fields are only added, with defaults."""

    job: str = ""
    opened_ns: int = 0
    """When the incident was opened, nanoseconds of the wall clock."""
    since_ns: int = 0
    """When it came into this stage; 0: a release that does not say so answered."""
    machines: list[str] = Field(default_factory=list)
    """That the fault concerns."""
    to_approve: list[Eviction] = Field(default_factory=list)
    """Machines that leave the job once an operator approves it (``everstep approve``)."""
    tripped: str = ""
    """Why the breaker of evictions has an operator asked; empty: it did not trip in this incident."""
