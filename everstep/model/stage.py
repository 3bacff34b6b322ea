"""Defines the stages of an incident: their names, the record of each stage that is over, and the current stage.

These models are stored in histories, so fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.eviction import Eviction
from everstep.model.message import Model, Words


class Stage(Words):
    """The stages of an incident, in their order."""

    OPEN = "open"
    ALIGN = "align"
    """Before an update, or before a machine whose ranks step leaves, all ranks end the same step and save it."""
    VOTE = "vote"
    """The running ranks of a job that became slow are sampled, round by round."""
    TRACE = "trace"
    """The ranks of a job that hangs are sampled, to see which machine causes it."""
    STOP = "stop"
    """Every rank of the failed generation is ended, and the machines report ends of ranks and copies of state."""
    FIND = "find"
    """Disks and remote storage are asked for copies."""
    EVICT = "evict"
    """Machines that are faulty or gone leave the job, and standbys replace them."""
    DECIDE = "decide"
    DIAGNOSE = "diagnose"
    """The machines of the stopped job are tested."""
    REPLAY = "replay"
    """The script runs on groups of the job's machines, and the groups are compared."""
    RESTORE = "restore"
    """Copies are brought to the machines whose ranks need them."""
    BACKOFF = "backoff"
    """The incident waits before the next reattempt."""
    REATTEMPT = "reattempt"
    CONFIRM = "confirm"
    PARKED = "parked"
    """The incident waits for an operator, or for silent machines."""
    ACCEPTED = "accepted"
    """An operator accepted that newer state may be lost. This is only recorded: no incident stays in this stage."""
    OBSERVED = "observed"
    """The job keeps running with the fault; nothing was done."""
    RECOVERED = "recovered"
    NOT_CONFIRMED = "running, not confirmed"
    ABANDONED = "abandoned"
    CLOSED = "closed"
    """The last entry in the ledger."""


NOT_CONFIRMED = str(Stage.NOT_CONFIRMED)
"""The name of the state of a job that runs, as far as known, and was not seen to step."""


class StageRecord(Model):
    """A stage that is over: its name, duration and result."""

    name: str
    seconds: float
    found: str = ""
    to_accept: str = ""
    """The state with which an operator may resume a parked incident although a newer state may exist; empty: none."""


class CurrentStage(StageRecord):
    """The current stage, with what an operator has to know about it."""

    job: str = ""
    opened_ns: int = 0
    """When the incident was opened, nanoseconds of the wall clock."""
    since_ns: int = 0
    """When the incident entered this stage, nanoseconds of the wall clock."""
    machines: list[str] = Field(default_factory=list)
    """Machines that the fault concerns."""
    to_approve: list[Eviction] = Field(default_factory=list)
    """Evictions that wait for the approval of an operator (``everstep approve``)."""
    rule: str = ""
    """The rule that parked the job (``everstep.decisions.act.recover.rules``); empty: the job is not parked."""
    tripped: str = ""
    """Why the breaker of evictions asks for an operator; empty: it did not trip in this incident."""
