"""Defines what the machines of a job report once its ranks are stopped: the ends of ranks, and the copies of state.

These models are sent through Temporal and are stored in histories and in the ledger, so fields are only added, with
defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.finding import MachineFinding
from everstep.model.message import Model
from everstep.model.ranks import NO_RANKS, Ranks
from everstep.model.state_copy import StateCopies, Tier


class Classification(Model):
    """The cause of a rank's end, from its exit, exception and last output (``everstep.decisions.blame.classify``)."""

    fault: str
    """The class, e.g. ``gpu out of memory``, or ``unknown``."""
    owner: str
    """The ``Owner`` of the fault, who has to act."""
    reason: str
    """Reason code: the name of the rule, e.g. ``gpu-out-of-memory``."""
    consequence: bool = False
    """The end follows from the end of another process."""
    place: str = ""
    """Where an exception was raised: ``file:line in function`` of the user's code."""
    evidence: list[str] = Field(default_factory=list)
    """The lines of output that show the cause, in order; empty: the exit shows it, or the lines are not kept."""


class RankExit(Model):
    """The end of a rank, and of further ranks that ended in the same way."""

    rank: int
    machine: str
    pid: int = 0
    code: int | None = None
    signal: int | None = None
    time_ns: int = 0
    stopped_by_us: bool = False
    completed_steps: int = -1
    exception: str = ""
    log_tail: str = ""
    shown_steps: int = -1
    """Steps that the rank showed, by reports, by calls of the optimizer or by ``run.steps``; -1: not known."""
    classification: Classification | None = None
    """The cause of the rank's end, as the agent classified it; None: the rank lived until a stop killed it."""
    others: Ranks = NO_RANKS
    """Further ranks that ended in the same way, after ``rank``. Their pids, times and output are not kept."""

    @property
    def ranks(self) -> Ranks:
        """All ranks that ended in this way."""
        return self.others | Ranks.of([self.rank])


class Unlisted(Model):
    """Storage that may have copies and could not be listed. Its contents are unknown: it does not count as empty."""

    tier: Tier
    machines: list[str] = Field(default_factory=list)
    """The machines whose disks could not be listed; empty for remote storage, which any machine can list."""
    reason: str = ""


class Evidence(Model):
    """All that the machines report once a generation is stopped.

    It is small enough to be sent whole: ranks, copies and machines that differ only in their numbers are one entry.
    """

    generation: int
    machines: list[str] = Field(default_factory=list)
    """The machines of the job, in the order of their ranks, when they were asked; empty: not known."""
    exits: list[RankExit] = Field(default_factory=list)
    """The ends of all ranks. The first ranks that ended by themselves are entries of their own, with their output."""
    held: list[StateCopies] = Field(default_factory=list)
    unreachable: list[str] = Field(default_factory=list)
    refusing: dict[str, str] = Field(default_factory=dict)
    """Unreachable machine whose agent is there, but it and the worker do not accept each other → why."""
    cut_off: bool = False
    """No machine of the job answers, and no other machine of the cluster does: the worker may be cut off."""
    problem: str = ""
    """Why the machines could not be asked at all."""
    emptied: list[str] = Field(default_factory=list)
    """Machines that answered but have lost their memory, and so know nothing of the job."""
    disk_shared: bool = False
    """Several machines listed the same files: the folder of disk checkpoints is shared."""
    dying: dict[str, str] = Field(default_factory=dict)
    """Machine with killed ranks that are not gone yet → these ranks, for people. For such a machine only ``findings``
    are known, and the job cannot be launched on it."""
    unlisted: list[Unlisted] = Field(default_factory=list)
    """Disks and remote storage that could not list their copies, by reason."""
    searched: bool = False
    """All disks and remote storage were asked for copies, even by machines that had lost their memory."""
    findings: list[MachineFinding] = Field(default_factory=list)
    """Findings of inspections, the worst first. If there are very many, those that evict no machine are left out."""
    alike: dict[str, int] = Field(default_factory=dict)
    """Reason code → the number of machines with such a fault, of all findings. A fault that most machines share evicts
    none of them."""
    disk_asked: int | None = None
    """The newest step that was requested on disk since the launch, in addition to regular steps; 0: none was requested;
    None: no machine knows."""
    save_every: int = 0
    """After how many steps the ranks saved last; 0: no machine knows."""
