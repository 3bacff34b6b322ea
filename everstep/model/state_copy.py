"""Defines copies of the state of ranks: where they are, which have to be restored, and the result of a restore.

These models are sent through Temporal and are stored in histories, so fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.message import Model, Words


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


CopyKey = tuple[int, int, Tier, str, int]
"""The identity of a copy: rank, completed steps, tier, machine, and when it was saved."""


class StateCopy(Model):
    """A copy of the state of a rank after ``completed_steps`` steps."""

    rank: int
    machine: str
    """The machine that has it; for a remote copy, the machine whose agent listed it."""
    completed_steps: int
    bytes: int = 0
    valid: bool = True
    reason: str = ""
    tier: Tier = Tier.OWN
    generation: int = 0
    """Generation of the job that saved it."""
    saved_ns: int = 0
    digest: str = ""
    """Digest of its tensors, for a copy on disk or remote storage: ranks with equal digests can share one read."""
    run: str = ""
    """The run that saved it, or that holds it in memory (``everstep.model.run_id``); empty: not known."""
    topology: str = ""
    """Topology of the job that saved it, for a copy on disk or remote storage; empty: not known."""
    verified: bool = True
    """Whether the contents of a valid copy in memory match their checksum; False: only the header was checked."""

    @property
    def key(self) -> CopyKey:
        """The identity of the copy."""
        return self.rank, self.completed_steps, self.tier, self.machine, self.saved_ns

    @property
    def unlisted(self) -> bool:
        """Whether this record stands for a folder or storage that could not be listed, rather than for a bad copy."""
        return not self.valid and self.completed_steps < 0 and self.tier in {Tier.DISK, Tier.REMOTE}


class CopyToRestore(Model):
    """A copy that has to be brought to a rank before the rank can restore, and where it is."""

    rank: int
    completed_steps: int
    tier: Tier
    machine: str
    saved_ns: int = 0
    """When the rank saved it, which distinguishes two saves of the same step; 0: any save."""

    @property
    def key(self) -> CopyKey:
        """The identity of the copy."""
        return self.rank, self.completed_steps, self.tier, self.machine, self.saved_ns


class Restored(Model):
    """The result of bringing copies to the machines that need them."""

    moved: list[CopyToRestore] = Field(default_factory=list)
    failed: list[StateCopy] = Field(default_factory=list)
    """Copies that are damaged or gone, marked as not valid, with reasons."""
    unreached: list[StateCopy] = Field(default_factory=list)
    """Copies that may be good but could not be brought, marked as not valid, with reasons."""
    verified: list[CopyToRestore] = Field(default_factory=list)
    """Copies in a rank's own slots, whose contents were verified in place."""
    bytes: int = 0
    seconds: float = 0.0
    unreachable: list[str] = Field(default_factory=list)
    """Machines that needed copies and did not answer."""
