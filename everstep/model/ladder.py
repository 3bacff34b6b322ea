"""The ladder of stop-time checks: what was tried about a fault, and how far each of its stages may go.

These models cross Temporal and are stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from everstep.model.message import Model, Words


class Rung(Words):
    """What can be done about a stopped job, the dearer the further down (ByteRobust, section 4.2 and figure 5)."""

    REATTEMPT = "reattempt"
    """It is launched again as it is."""
    DIAGNOSE = "diagnose"
    """Its machines are tested."""
    ROLLBACK = "rollback"
    """It goes back to an earlier version of its code."""
    REPLAY = "replay"
    """Its script runs on groups of its machines, twice, and the groups are compared."""


class RungMode(Words):
    """How far a rung may go."""

    ACT = "act"
    APPROVE = "approve"
    """An operator is asked first; the job is parked meanwhile."""
    SHADOW = "shadow"
    """It is written down that its turn would have come, and the next one is taken."""
    OFF = "off"


class Tried(Model):
    """One thing that was tried about a fault."""

    rung: Rung
    symptom: str
    """Of the failure that it was tried for."""
    cause: str = ""
    step: int = -1
    """Completed steps when the job failed; -1: not known."""
    machine: str = ""
    """On which the first rank failed; empty: not known."""
    time_ns: int = 0
    """When the job failed."""
    why: str = ""
    """Why this was tried."""
    found: str = ""
    """What came of it, for people; empty: nothing is known yet."""
    seconds: float = 0.0
    """What it cost."""
    generation: int
    """That failed."""
    path: str = ""
    """Of the ladder's table, by its name; empty: not known."""
