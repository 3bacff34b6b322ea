"""One stage of an incident; it is stored in histories: fields are only added, with defaults."""

from __future__ import annotations

from everstep.model.message import Model


class StageRecord(Model):
    """Its name, what it cost, and what came of it."""

    name: str
    seconds: float
    found: str = ""
    to_accept: str = ""
    """Of a parked incident: from where an operator may let the job go on though something newer may exist."""
