"""The stages of an incident: which there are, what each that is over cost, and the one that it is in now.

These models are stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.eviction import Eviction
from everstep.model.message import Model, Words


class Stage(Words):
    """Where an incident stands, in the order in which it gets there."""

    OPEN = "open"
    ALIGN = "align"
    """Before an update the ranks come to the end of the same step, and save it."""
    VOTE = "vote"
    """The ranks of a job that became slow are looked at, round by round, while it goes on."""
    TRACE = "trace"
    """The ranks of a job that stands still are looked at, to see on which machine it hangs."""
    STOP = "stop"
    """Every rank of the failed generation is ended, and the machines are asked what they know."""
    FIND = "find"
    """Disks and remote storage are asked for copies."""
    EVICT = "evict"
    """Machines that are at fault, or gone, leave the job, and standbys take their places."""
    DECIDE = "decide"
    DIAGNOSE = "diagnose"
    """The machines of the stopped job are tested."""
    REPLAY = "replay"
    """The script runs on groups of the job's machines, and the groups are compared."""
    RESTORE = "restore"
    """Copies are brought to the machines whose ranks need them."""
    BACKOFF = "backoff"
    """A reattempt waits its time."""
    REATTEMPT = "reattempt"
    CONFIRM = "confirm"
    PARKED = "parked"
    """It waits for an operator, or for machines that are silent."""
    ACCEPTED = "accepted"
    """An operator gave up what may be newer; only noted, an incident does not stay in it."""
    OBSERVED = "observed"
    """A fault was seen with which the job goes on; nothing was done."""
    RECOVERED = "recovered"
    NOT_CONFIRMED = "running, not confirmed"
    ABANDONED = "abandoned"
    CLOSED = "closed"
    """The last entry in the ledger."""


NOT_CONFIRMED = str(Stage.NOT_CONFIRMED)
"""What a job is called that goes on as far as anybody can see, and was not seen to step."""


class StageRecord(Model):
    """Its name, what it cost, and what came of it."""

    name: str
    seconds: float
    found: str = ""
    to_accept: str = ""
    """Of a parked incident: from where an operator may let the job go on though something newer may exist."""


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
