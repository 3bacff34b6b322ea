"""What looks at the ranks of a job say of why it stands still.

These models are stored in histories and in the ledger: fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.message import Model, Words


class HangConclusion(Words):
    """What an analysis came to."""

    NAMES = "names"
    """The rank, or the pair of ranks, that the others wait for."""
    OVER_EVICTS = "over-evicts"
    """A parallel group in which the fault is; most of its machines are innocent, and go on purpose."""
    NOT_A_MACHINE = "not a machine"
    """The script itself has its ranks wait for each other: evicting helps nothing, another version may."""
    NOT_HUNG = "not hung"
    """Ranks that wait for others came on between two looks."""
    UNKNOWN = "nothing known"
    """The evidence names nobody; nobody is to be evicted for it."""


class HangMethod(Words):
    """What an analysis rests on."""

    STATE = "process state"
    WAIT_FOR = "wait-for graph"
    STACKS = "stack outliers"
    NONE = "none"


class HangFound(Model):
    """The verdict of one analysis, as an incident keeps it (``everstep.decisions.blame.hang``)."""

    generation: int
    """Of the ranks that were looked at."""
    conclusion: HangConclusion
    method: HangMethod = HangMethod.NONE
    reason: str = ""
    """In one sentence."""
    ranks: list[int] = Field(default_factory=list)
    """Those that are named, or that the shared group was found by; of very many the first."""
    machines: list[str] = Field(default_factory=list)
    """To leave the job; none unless it names or over-evicts."""
    suspects: list[str] = Field(default_factory=list)
    """Those of them that have one of these ranks."""
    innocent: int = 0
    """So many of ``machines`` leave though nothing points at them."""
    evidence: list[str] = Field(default_factory=list)
    """What it rests on, the strongest first."""
    picture: str = ""
    """The topology with what each rank does, as text; of a large job its beginning."""
    silent: list[str] = Field(default_factory=list)
    """Machines that did not say what their ranks do."""
    unknown: int = 0
    """Ranks of which nothing is known; that is no sign of health."""
    looks: int = 0
    seconds: float = 0.0
    """That the looks took, with the time between them."""
    left_out: str = ""
    """Why not all of what was seen is kept in the ledger; empty: all is."""

    @property
    def evicts(self) -> bool:
        """Whether machines are to leave."""
        return bool(self.machines)

    @property
    def over_evicts(self) -> bool:
        """Whether innocent machines leave with the one at fault, on purpose."""
        return self.conclusion is HangConclusion.OVER_EVICTS
