"""What an analysis of a hang says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.base.text import listed
from everstep.model.hang import HangConclusion, HangMethod


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """A group of ranks that work together."""

    kind: str
    """``pp``; several axes taken together: ``pp+tp``; ``machine``: the ranks of one."""
    ranks: tuple[int, ...]
    machines: tuple[int, ...]

    def __str__(self) -> str:
        """For people."""
        if self.kind == "machine":
            return f"machine {self.machines[0]}"
        return f"{self.kind} group of machine{'s' * (len(self.machines) > 1)} {listed(self.machines)}"


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks that do the same."""

    text: str
    """What they do."""
    ranks: tuple[int, ...]
    dominant: bool
    """Most of the peers in their pipeline stage, or of the job, do it: taken for healthy."""


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Which machines should leave a job that hangs, and why; none unless ``conclusion`` names or over-evicts."""

    conclusion: HangConclusion
    method: HangMethod
    reason: str
    """In one sentence."""
    ranks: tuple[int, ...] = ()
    """Those that are named, or that the shared group was found by."""
    machines: tuple[int, ...] = ()
    """To be evicted."""
    innocent: int = 0
    """So many of ``machines`` are evicted though nothing points at them; at least."""
    group: ParallelGroup | None = None
    """That was found by outliers."""
    alternatives: tuple[ParallelGroup, ...] = ()
    """Groups that explain the outliers as well: what comes next if the job hangs again."""
    unexplained: tuple[int, ...] = ()
    """Outliers that are in no common group with the others; they stay."""
    unknown: tuple[int, ...] = ()
    """Ranks of which nothing is known; that is no sign of health."""
    evidence: tuple[str, ...] = ()
    """What the verdict rests on, the strongest first."""
    stacks: tuple[StackGroup, ...] = ()
    """Who does what, the largest group first."""
    picture: str = ""
    """The topology with the groups, as text."""

    @property
    def evicts(self) -> bool:
        """Whether machines are to be evicted."""
        return bool(self.machines)


def names_of(machines: Sequence[int], names: Sequence[str] = ()) -> tuple[str, ...]:
    """Machines for people: by their names where there are some, else ``machine 3``."""
    return tuple(names[machine] if machine < len(names) else f"machine {machine}" for machine in machines)
