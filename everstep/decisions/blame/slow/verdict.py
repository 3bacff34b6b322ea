"""What an analysis of a slow job says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from everstep.decisions.blame.hang.verdict import ParallelGroup


class SlowConclusion(StrEnum):
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


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the vote."""

    steps: tuple[int, ...]

    outliers: tuple[int, ...]
    """Ranks that were slower than their peers."""
    flagged: ParallelGroup | None
    """The group with most of them; None: there are none."""


@dataclass(frozen=True, slots=True)
class SlowVerdict:
    """What slows a job down, and which machines should leave for it: none, unless it is a machine."""

    conclusion: SlowConclusion
    reason: str
    """In one sentence."""
    machines: tuple[int, ...] = ()
    """To be evicted."""
    ranks: tuple[int, ...] = ()
    """The slow ones."""
    group: ParallelGroup | None = None
    """That was flagged most often."""
    flags: int = 0
    """In so many rounds."""
    slowdown: float = 1.0
    """How much longer the slow ranks compute than their peers: 1.25 is a quarter."""
    rounds: tuple[Round, ...] = ()
    stages: tuple[tuple[int, float], ...] = ()
    """Pipeline stage and what a rank of it computes in a step, in seconds."""
    evidence: tuple[str, ...] = ()
