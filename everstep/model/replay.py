"""What a dual-phase replay showed: each run of a group, and what all of them say together.

These models cross Temporal and are stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.message import Model, Words


class RunEnd(Words):
    """How a group's run of the script ended."""

    RAN = "ran"
    """All ranks came to the last step of the replay: what they computed can be compared."""
    CRASHED = "crashed"
    """A rank ended before."""
    HUNG = "hung"
    """All ranks did a first step, and the time was up before the last one: nothing went on any more."""
    SLOW = "slow"
    """The same, and steps went on until then: that may be for want of time alone."""
    NOT_STARTED = "not started"
    """Ranks did not come to a first step in time: that may be a slow start, and is tried again."""
    NOT_FINITE = "not finite"
    """A loss or a gradient norm was NaN or infinite."""
    UNABLE = "unable"
    """It could not be run, for a reason that says nothing of its machines."""


class GroupRun(Model):
    """One run of the job's script on one group of machines, or several that ended alike."""

    group: str
    """``row 3`` or ``column 1``."""
    machines: list[str]
    """Empty: of several runs; the plan says it."""
    end: RunEnd
    count: int = 1
    """So many runs: this is the first of them."""
    repeat: int = 1
    """Of several the last one."""
    why: str = ""
    """Where it did not come to its end: what was seen, for people."""
    steps: int = 0
    """Completed by all of its ranks."""
    losses: list[str] = Field(default_factory=list)
    """Of each step a digest of the losses and gradient norms of all ranks, bit for bit."""
    steps_each: int = 1
    """Steps in a row that share one of them, but for the last ones."""
    states: list[str] = Field(default_factory=list)
    """Of each rank the digest of its state at the end; empty: the script keeps no state that is known here."""
    ranks_each: int = 1
    """Ranks in a row that share one of them, but for the last ones."""
    shape: str = ""
    """Of how many steps and ranks these are, in words: what is missing is no difference. Empty: not said."""
    answer: str = ""
    """One digest of all of these, where they are not kept."""
    kind: str = ""
    """What hardware its machines have, in their order: only groups of one kind can be compared."""
    seconds: float = 0.0
    """Of several all together."""


class ReplayFound(Words):
    """What a replay says."""

    NOTHING = "nothing"
    """No group showed a fault: that clears nobody."""
    ONE = "one"
    """A single machine at fault explains what was seen: it is among the suspects, alone where m ≤ n."""
    SEVERAL = "several"
    """No single machine does: several are at fault, and all that may be are suspects."""
    EVERYWHERE = "everywhere"
    """All groups showed it: it is not of a machine."""
    INCONSISTENT = "inconsistent"
    """One phase showed a fault that no machine explains: it does not show in every run."""
    INCOMPLETE = "incomplete"
    """Groups that could not be run to their end, or compared, leave open who is at fault."""
    UNABLE = "unable"
    """The replay could not be carried out."""


class Replayed(Model):
    """What a replay of a job found."""

    found: ReplayFound
    text: str
    """For people."""
    suspects: list[str] = Field(default_factory=list)
    """Machines to evict."""
    evidence: list[str] = Field(default_factory=list)
    """What the groups that showed a fault showed."""
    repeats: int = 0
    """How often both phases were run."""
    seconds: float = 0.0
