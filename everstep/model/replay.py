"""Defines the outcome of a dual-phase replay: each trial of a group of machines, and the conclusion from all trials.

These models are sent through Temporal and are stored in histories, so fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.message import Model, Words


class RunEnd(Words):
    """How a group's trial of the script ended."""

    RAN = "ran"
    """All ranks completed the last step: what they computed can be compared."""
    CRASHED = "crashed"
    """A rank ended before the last step."""
    HUNG = "hung"
    """All ranks completed a first step, but steps had stopped when the time was over."""
    SLOW = "slow"
    """Ranks still completed steps when the time was over, so the time may have been too short."""
    NOT_STARTED = "not started"
    """Not all ranks completed a first step in time. The start may only have been slow, so the trial is repeated."""
    NOT_FINITE = "not finite"
    """A loss or a gradient norm was NaN or infinite."""
    UNABLE = "unable"
    """The trial could not be run, for a reason that does not concern its machines."""


class GroupRun(Model):
    """One trial, which runs the job's script on one group of machines, or several trials that ended alike."""

    group: str
    """The group, ``row 3`` or ``column 1``."""
    machines: list[str]
    """The machines of the group; empty for several trials, whose machines the plan names."""
    end: RunEnd
    count: int = 1
    """Number of trials that this record stands for; the fields are those of the first trial."""
    repeat: int = 1
    """Number of the repeat of the two phases, from 1; for several trials, the number of the last repeat."""
    why: str = ""
    """Why the trial did not complete, for people; empty: it completed."""
    steps: int = 0
    """Steps that all of its ranks completed."""
    losses: list[str] = Field(default_factory=list)
    """For each step one digest of the losses and gradient norms of all ranks, bit for bit."""
    steps_each: int = 1
    """Consecutive steps that share one digest; the last digest may have fewer."""
    states: list[str] = Field(default_factory=list)
    """For each rank the digest of its state at the end; empty: the script saves no state with everstep."""
    ranks_each: int = 1
    """Consecutive ranks that share one digest; the last digest may have fewer."""
    shape: str = ""
    """Number of steps and ranks in the digests, in words; empty: not known. A missing digest does not count as a
    difference."""
    answer: str = ""
    """One digest of all digests, if those are not kept."""
    kind: str = ""
    """The hardware of its machines, in order: only groups of one kind can be compared."""
    seconds: float = 0.0
    """Duration; for several trials, the sum of their durations."""


class ReplayConclusion(Words):
    """The conclusion of a replay."""

    NOTHING = "nothing"
    """No group showed a fault. That does not prove any machine healthy."""
    ONE = "one"
    """One faulty machine explains all faults. It is among the suspects, and is the only suspect if m ≤ n."""
    SEVERAL = "several"
    """Only several faulty machines explain the faults. All machines that may be faulty are suspects."""
    EVERYWHERE = "everywhere"
    """All groups showed the fault: no machine causes it."""
    INCONSISTENT = "inconsistent"
    """The groups showed a fault that no machine explains, so the fault does not occur in every trial."""
    INCOMPLETE = "incomplete"
    """Trials that failed or cannot be compared leave open which machine is at fault."""
    UNABLE = "unable"
    """The replay could not be carried out."""


class Replayed(Model):
    """The outcome of a replay of a job."""

    found: ReplayConclusion
    text: str
    """The outcome in one sentence."""
    suspects: list[str] = Field(default_factory=list)
    """Machines to evict."""
    evidence: list[str] = Field(default_factory=list)
    """The faults of the groups that showed a fault."""
    repeats: int = 0
    """Number of times that both phases were run."""
    seconds: float = 0.0
