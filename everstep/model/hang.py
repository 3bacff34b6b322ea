"""Defines the verdict about a job that hangs, from samples of what its ranks do.

These models are stored in histories and in the ledger, so fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.message import Model, Words


class HangConclusion(Words):
    """The conclusion of an analysis."""

    NAMES = "names"
    """The verdict names the rank, or the pair of ranks, that all others wait for."""
    OVER_EVICTS = "over-evicts"
    """The verdict names a parallel group with the fault. All machines of the group are evicted, though most are
    innocent."""
    NOT_A_MACHINE = "not a machine"
    """The script itself makes its ranks wait for each other: only other code can help."""
    NOT_HUNG = "not hung"
    """Ranks progressed between two samples."""
    UNKNOWN = "nothing known"
    """The evidence names no rank: no machine is evicted."""


class HangMethod(Words):
    """The method of an analysis."""

    STATE = "process state"
    WAIT_FOR = "wait-for graph"
    STACKS = "stack outliers"
    NONE = "none"


class HangResult(Model):
    """The verdict of one analysis, as an incident keeps it (``everstep.decisions.blame.hang``)."""

    generation: int
    """The generation of the sampled ranks."""
    conclusion: HangConclusion
    method: HangMethod = HangMethod.NONE
    reason: str = ""
    """The verdict in one sentence."""
    ranks: list[int] = Field(default_factory=list)
    """The ranks that the verdict names, or whose shared group it names; only the first ranks if there are very many."""
    machines: list[str] = Field(default_factory=list)
    """Machines to evict; empty unless the conclusion names or over-evicts."""
    suspects: list[str] = Field(default_factory=list)
    """The machines in ``machines`` that run a rank in ``ranks``."""
    innocent: int = 0
    """Number of ``machines`` against which there is no evidence."""
    evidence: list[str] = Field(default_factory=list)
    """The evidence, the strongest first."""
    picture: str = ""
    """The topology with the state of each rank, as text; only the beginning for a large job."""
    silent: list[str] = Field(default_factory=list)
    """Machines that did not report what their ranks do."""
    unknown: int = 0
    """Number of ranks whose state is unknown; such a rank does not count as healthy."""
    looks: int = 0
    """Number of samples."""
    seconds: float = 0.0
    """Seconds from the beginning of the first sample to the end of the last sample."""
    left_out: str = ""
    """Why the ledger lacks stacks of ranks that matter; empty: it lacks none."""

    @property
    def evicts(self) -> bool:
        """Whether machines are to be evicted."""
        return bool(self.machines)

    @property
    def over_evicts(self) -> bool:
        """Whether innocent machines are evicted with the faulty one, on purpose."""
        return self.conclusion is HangConclusion.OVER_EVICTS
