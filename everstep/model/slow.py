"""Defines the vote over the ranks of a slow job: its rounds and its verdict.

These models are stored in histories and in the ledger, so fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.message import Model, Words


class SlowConclusion(Words):
    """What makes a job slow."""

    MACHINE = "machine"
    """A machine, or a group of machines, is slower than its peers at the same work."""
    HEAVY_STAGE = "heavy stage"
    """A pipeline stage has more to do than the others: the cause is the job's layout."""
    UNEVEN_WORK = "uneven work"
    """Ranks have more to do in some steps than in others, e.g. longer sequences: the cause is the job's data."""
    SUSPECT = "suspect"
    """Samples name a machine, without other evidence that it is slow."""
    ALL_SLOWER = "all slower"
    """All ranks compute longer than before: the cause is in the job's work, or in something that the machines share."""
    WAITING = "waiting"
    """No rank computes longer than before: the ranks wait for the network, for storage, or for something else."""
    EVEN = "even"
    """No rank is slower than others."""
    UNKNOWN = "nothing known"
    """Too few steps, ranks or operations to compare."""


class SlowRound(Model):
    """One round of the vote (``everstep.decisions.blame.slow``)."""

    number: int
    looks: int = 0
    """Number of samples of all ranks."""
    outliers: list[int] = Field(default_factory=list)
    """Ranks that wait for others less often than their peers do; only the first ranks if there are very many."""
    flagged: str = ""
    """The group with the most outliers, for people; empty: none."""
    machines: list[str] = Field(default_factory=list)
    """Machines of that group."""
    ranks: list[int] = Field(default_factory=list)
    """Outliers on these machines; only the first ranks if there are very many."""
    longer: dict[str, str] = Field(default_factory=dict)
    """Machine of that group → the ``Growth`` of its ranks' CPU time."""
    why: list[str] = Field(default_factory=list)
    """The contents of ``longer`` as text."""
    job: str = ""
    """The ``JobGrowth`` over all ranks."""
    job_why: str = ""
    problem: str = ""
    """Why the round has no result; empty: it has one."""
    silent: list[str] = Field(default_factory=list)
    """Machines that did not report what their ranks do."""


class SlowResult(Model):
    """The verdict of a vote, as an incident keeps it."""

    generation: int
    conclusion: SlowConclusion
    reason: str = ""
    """The verdict in one sentence."""
    machines: list[str] = Field(default_factory=list)
    """Machines to evict; empty unless the conclusion is a machine."""
    suspects: list[str] = Field(default_factory=list)
    """Machines that were flagged most often, also if the conclusion is not a machine."""
    ranks: list[int] = Field(default_factory=list)
    """Outliers on these machines."""
    flags: int = 0
    """Number of rounds in which they were flagged."""
    rounds: int = 0
    evidence: list[str] = Field(default_factory=list)
    """The evidence, round by round."""
