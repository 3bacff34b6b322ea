"""The verdict of an analysis of a hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.base.text import listed
from everstep.model.hang import HangConclusion, HangMethod


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """A group of ranks that work together."""

    kind: str
    """The kind of group: an axis (``pp``), several axes (``pp+tp``), or ``machine`` for the ranks of one machine."""
    ranks: tuple[int, ...]
    machines: tuple[int, ...]

    def __str__(self) -> str:
        """Return text for people."""
        if self.kind == "machine":
            return f"machine {self.machines[0]}"
        return f"{self.kind} group of machine{'s' * (len(self.machines) > 1)} {listed(self.machines)}"


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks with the same activity."""

    text: str
    """The activity of the ranks."""
    ranks: tuple[int, ...]
    dominant: bool
    """The activity is dominant (``outliers``): it counts as healthy."""


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """The machines that should leave a job that hangs, and why. Only NAMES and OVER_EVICTS name machines."""

    conclusion: HangConclusion
    method: HangMethod
    reason: str
    """The verdict in one sentence."""
    ranks: tuple[int, ...] = ()
    """The ranks that are named, or that led to the shared group."""
    machines: tuple[int, ...] = ()
    """The machines to be evicted."""
    innocent: int = 0
    """The least number of ``machines`` that are evicted without a sign of a fault."""
    group: ParallelGroup | None = None
    """The group that outliers share."""
    alternatives: tuple[ParallelGroup, ...] = ()
    """Other groups that explain the outliers equally well: the next choice if the job hangs again."""
    unexplained: tuple[int, ...] = ()
    """Outliers that share no group with the other outliers; they stay."""
    unknown: tuple[int, ...] = ()
    """Ranks of which nothing is known. They do not count as healthy."""
    is_outside: bool = False
    """The job waits for something outside of it, and not for a machine."""
    evidence: tuple[str, ...] = ()
    """The evidence for the verdict, the strongest first."""
    stacks: tuple[StackGroup, ...] = ()
    """The groups of ranks with the same activity, the largest group first."""
    picture: str = ""
    """The topology with the groups, as text."""

    @property
    def evicts(self) -> bool:
        """Whether machines are to be evicted."""
        return bool(self.machines)


def names_of(machines: Sequence[int], names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of machines; a machine without a name is called ``machine 3``."""
    return tuple(names[machine] if machine < len(names) else f"machine {machine}" for machine in machines)
