"""Copies of the state of ranks: where they lie, which are to be restored, and what came of that.

These models cross Temporal and are stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import Field

from everstep.model.message import Model, Words


class Tier(Words):
    """Where a copy of a rank's state lies, in the order in which a restore prefers them."""

    OWN = "own memory"
    """Shared memory of the machine that runs the rank."""
    BACKUP = "backup"
    """Shared memory of the rank's peer."""
    DISK = "disk"
    """A machine's local disk."""
    REMOTE = "remote"
    """Object storage or a shared file system."""


CopyKey = tuple[int, int, Tier, str, int]
"""Which copy of which rank: rank, completed steps, tier, machine, and when it was saved."""


class StateCopy(Model):
    """A copy of the state of a rank after ``completed_steps`` steps."""

    rank: int
    machine: str
    """Where it is; of a remote copy: the machine whose agent listed it."""
    completed_steps: int
    bytes: int = 0
    valid: bool = True
    reason: str = ""
    tier: Tier = Tier.OWN
    generation: int = 0
    """Of the job, when it was saved."""
    saved_ns: int = 0
    digest: str = ""
    """Of its tensors, on disk and remote: equal for equal bytes, so that one rank can read for its whole dp group."""
    run: str = ""
    """That saved it; in memory: that holds it. Empty: not known (``everstep.model.run_id``)."""
    topology: str = ""
    """Of the job that saved it, on disk and remote; empty: not known."""
    verified: bool = True
    """Of what is valid in memory: its contents were compared with their checksum; else only its header."""

    @property
    def key(self) -> CopyKey:
        """Which copy it is."""
        return self.rank, self.completed_steps, self.tier, self.machine, self.saved_ns

    @property
    def unlisted(self) -> bool:
        """Whether it stands for a folder or storage that could not be listed, with the reason; nothing is known bad."""
        return not self.valid and self.completed_steps < 0 and self.tier in {Tier.DISK, Tier.REMOTE}


class CopyToRestore(Model):
    """What one rank has to be given before it can restore: which copy, and where it is."""

    rank: int
    completed_steps: int
    tier: Tier
    machine: str
    saved_ns: int = 0
    """When the rank saved it: two copies of a rank's step are the same when they say the same here. 0: any."""

    @property
    def key(self) -> CopyKey:
        """Which copy it is."""
        return self.rank, self.completed_steps, self.tier, self.machine, self.saved_ns


class Restored(Model):
    """What came of bringing copies to the machines that need them."""

    moved: list[CopyToRestore] = Field(default_factory=list)
    failed: list[StateCopy] = Field(default_factory=list)
    """Copies that turned out damaged or gone, not valid, with reasons."""
    unreached: list[StateCopy] = Field(default_factory=list)
    """Copies that may be good and could not be brought, not valid for now, with reasons."""
    verified: list[CopyToRestore] = Field(default_factory=list)
    """Own slots whose contents were compared where they are, and hold."""
    bytes: int = 0
    seconds: float = 0.0
    unreachable: list[str] = Field(default_factory=list)
    """Machines that should have been given copies and did not answer."""
