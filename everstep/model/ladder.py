"""Defines the ladder of stop-time checks: its rungs, how far each may go, and the rungs that were tried for a fault.

These models are sent through Temporal and are stored in histories, so fields are only added, with defaults.
"""

from __future__ import annotations

from everstep.model.message import Model, Words


class Rung(Words):
    """The actions on a stopped job, each more expensive than the one before (ByteRobust, section 4.2, figure 5)."""

    REATTEMPT = "reattempt"
    """The job is launched again as it is."""
    DIAGNOSE = "diagnose"
    """The job's machines are tested."""
    ROLLBACK = "rollback"
    """The job goes back to an earlier version of its code."""
    REPLAY = "replay"
    """The job's script runs on groups of its machines, twice, and the groups are compared."""


class RungMode(Words):
    """How far a rung may go."""

    ACT = "act"
    APPROVE = "approve"
    """The job is parked until an operator approves."""
    SHADOW = "shadow"
    """The rung is only recorded, and the next rung is tried."""
    OFF = "off"


class TriedRung(Model):
    """A rung that was tried for a fault."""

    rung: Rung
    symptom: str
    """The symptom of the failure."""
    cause: str = ""
    step: int = -1
    """Completed steps when the job failed; -1: not known."""
    machine: str = ""
    """The machine on which the first rank failed; empty: not known."""
    time_ns: int = 0
    """When the job failed, nanoseconds of the wall clock."""
    why: str = ""
    """Why this rung was tried."""
    found: str = ""
    """The outcome, for people; empty: it is not known yet."""
    seconds: float = 0.0
    """How long it took."""
    generation: int
    """The generation that failed."""
    path: str = ""
    """Name of the path of the ladder's table; empty: not known."""
