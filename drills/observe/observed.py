"""What an injector saw beside the fault itself: the judge looks at it."""

from __future__ import annotations

from dataclasses import dataclass, field

from drills.observe.step_records import Records
from drills.observe.stored_copies import Damaged
from drills.spec.loss import Promise


@dataclass(frozen=True, slots=True)
class Absorbed:
    """A part beside the ranks was killed, or stood still, and came back."""

    killed_ns: int
    back_ns: int | None


@dataclass(slots=True)
class DrillObservations:
    """One drill's."""

    absorbed: Absorbed | None = None
    found_ns: int | None = None
    """When an inspection had found what was broken."""
    promise: Promise | None = None
    """How many steps the strike may cost."""
    standby: str = ""
    """The machine that was to take the place of a lost one, and could not."""
    damaged: list[Damaged] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    """Machines that lost memory and disk."""
    records: Records = field(default_factory=Records)
    """Step records of machines that were emptied."""
    asked: list[str] = field(default_factory=list)
    """Folders of the code that the job was asked to take."""
    said: set[str] = field(default_factory=set)
    """Problems with backups and disks that the agents told of."""
    lag: int | None = None
    """Most steps that a backup was behind; None: nobody looked."""
    trouble: str = ""
    """Why the fault could not be injected as planned."""
