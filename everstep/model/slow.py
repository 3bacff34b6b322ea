"""What a vote over the ranks of a slow job says, round by round and in the end.

These models are stored in histories and in the ledger: fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.message import Model, Words


class SlowConclusion(Words):
    """What slows a job down."""

    MACHINE = "machine"
    """A machine, or a group of them, is slower than its peers at the same work."""
    HEAVY_STAGE = "heavy stage"
    """A pipeline stage has more to do than the others: the job's layout."""
    UNEVEN_WORK = "uneven work"
    """Ranks have more to do in some steps than in others, e.g. longer sequences: the job's data."""
    SUSPECT = "suspect"
    """Looks name a machine, and nothing else says that it is slow."""
    ALL_SLOWER = "all slower"
    """All ranks compute longer than before: what the job does, or what the machines share."""
    WAITING = "waiting"
    """No rank computes longer than before: the network, storage, or what the script waits for."""
    EVEN = "even"
    """Nobody is slower than others."""
    UNKNOWN = "nothing known"
    """Too few steps, ranks or operations to compare."""


class SlowRound(Model):
    """One round of the vote (``everstep.decisions.blame.slow``)."""

    number: int
    looks: int = 0
    """At all ranks."""
    outliers: list[int] = Field(default_factory=list)
    """Ranks that wait for others less often than their peers; of very many the first."""
    flagged: str = ""
    """The group with most of them, for people; empty: none."""
    machines: list[str] = Field(default_factory=list)
    """Of that group."""
    ranks: list[int] = Field(default_factory=list)
    """Outliers on these; of very many the first."""
    longer: dict[str, str] = Field(default_factory=dict)
    """Machine of that group → the ``Growth`` that its ranks' CPU time shows."""
    why: list[str] = Field(default_factory=list)
    """The same for people."""
    job: str = ""
    """The ``JobGrowth`` of all ranks."""
    job_why: str = ""
    problem: str = ""
    """Why nothing is known of this round; empty: something is."""
    silent: list[str] = Field(default_factory=list)
    """Machines that did not say what their ranks do."""


class SlowFound(Model):
    """The verdict of a vote, as an incident keeps it."""

    generation: int
    conclusion: SlowConclusion
    reason: str = ""
    """In one sentence."""
    machines: list[str] = Field(default_factory=list)
    """To leave the job; none unless the conclusion is a machine."""
    suspects: list[str] = Field(default_factory=list)
    """That were flagged most often, whatever follows from it."""
    ranks: list[int] = Field(default_factory=list)
    """Outliers on these."""
    flags: int = 0
    """In so many rounds."""
    rounds: int = 0
    evidence: list[str] = Field(default_factory=list)
    """What it rests on, round by round."""
