"""Defines copies of the state of ranks: where they are, which have to be restored, and the result of a restore.

Tens of thousands of ranks have several copies each, so copies that differ only in rank and machine are one entry. These
models are sent through Temporal and are stored in histories, so fields are only added, with defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from pydantic import Field

from everstep.model.message import Model, Words
from everstep.model.places import Places
from everstep.model.ranks import NO_RANKS, Ranks


class Tier(Words):
    """The kinds of storage of copies, in the order in which a restore prefers them."""

    OWN = "own memory"
    """Shared memory of the machine that runs the rank."""
    BACKUP = "backup"
    """Shared memory of the rank's peer."""
    DISK = "disk"
    """A machine's local disk."""
    REMOTE = "remote"
    """Object storage or a shared file system."""


class StateCopies(Model):
    """Copies of the states of some ranks after ``completed_steps`` steps, which differ only in rank and machine."""

    places: Places
    """Machine → the ranks whose copies it has. For remote copies, it is the machine whose agent listed them."""
    completed_steps: int
    tier: Tier = Tier.OWN
    bytes: int = 0
    """The size of the largest copy; 0: not known."""
    valid: bool = True
    reason: str = ""
    generation: int = 0
    """Generation of the job that saved them."""
    saved_ns: int = 0
    """When the first of them was saved. The times distinguish two saves of the same step; 0: not known."""
    saved_until_ns: int = 0
    """When the last of them was saved; 0: at the same time as the first."""
    alike: Ranks = NO_RANKS
    """Of the ranks with copies on disk or remote storage, those whose tensors equal the tensors of the first rank of
    their data-parallel group: such ranks can share one read."""
    run: str = ""
    """The run that saved them, or that holds them in memory (``everstep.model.run_id``); empty: not known."""
    topology: str = ""
    """Topology of the job that saved them, for copies on disk or remote storage; empty: not known."""
    verified: bool = True
    """Whether the contents of valid copies in memory match their checksums; False: only headers were checked."""

    @classmethod
    def one(cls, rank: int, machine: str, completed_steps: int, **more: Any) -> Self:
        """Return the entry of a single copy."""
        return cls(places=Places({machine: str(rank)}), completed_steps=completed_steps, **more)

    @property
    def ranks(self) -> Ranks:
        """The ranks that have such a copy."""
        return self.places.ranks

    @property
    def machine(self) -> str:
        """The machine of the first rank's copy."""
        return self.places.first

    def changed(self, **fields: Any) -> Self:
        """Return the copies with other values of some fields."""
        return self.model_copy(update=fields)

    def at(self, places: Places) -> Self:
        """Return the copies at these places only."""
        return self if places is self.places else self.changed(places=places)

    def among(self, ranks: Ranks) -> Self:
        """Return the copies of these ranks only."""
        return self.at(self.places.among(ranks))

    def same_save(self, other: StateCopies) -> bool:
        """Return whether two entries can be about the same save of a step, apart from their places."""
        if (self.tier, self.completed_steps) != (other.tier, other.completed_steps):
            return False
        if not self.saved_ns or not other.saved_ns:
            return True
        return self.saved_ns <= other.last_ns and other.saved_ns <= self.last_ns

    @property
    def last_ns(self) -> int:
        """When the last of the copies was saved; 0: not known."""
        return max(self.saved_ns, self.saved_until_ns)

    @property
    def unlisted(self) -> bool:
        """Whether this record stands for a folder or storage that could not be listed, rather than for a bad copy."""
        return not self.valid and self.completed_steps < 0 and self.tier in {Tier.DISK, Tier.REMOTE}


def count_of(copies: Iterable[StateCopies]) -> int:
    """Return the number of copies, each copy of a rank counted."""
    return sum(b - a + 1 for entry in copies for _, spans in entry.places.each() for a, b in spans)


class Restored(Model):
    """The result of bringing copies to the machines that need them."""

    moved: list[StateCopies] = Field(default_factory=list)
    failed: list[StateCopies] = Field(default_factory=list)
    """Copies that are damaged or gone, marked as not valid, with reasons."""
    unreached: list[StateCopies] = Field(default_factory=list)
    """Copies that may be good but could not be brought, marked as not valid, with reasons."""
    verified: list[StateCopies] = Field(default_factory=list)
    """Copies in ranks' own slots, whose contents were verified in place."""
    bytes: int = 0
    seconds: float = 0.0
    unreachable: list[str] = Field(default_factory=list)
    """Machines that needed copies and did not answer."""
