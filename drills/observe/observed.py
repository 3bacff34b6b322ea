"""Observations of the injector besides the fault itself, for the judge."""

from __future__ import annotations

from dataclasses import dataclass, field

from drills.observe.step_records import Records
from drills.observe.stored_copies import Damaged
from drills.spec.loss import Promise


@dataclass(frozen=True, slots=True)
class Absorbed:
    """A part that is no rank was killed or hung, and came back."""

    killed_ns: int
    back_ns: int | None


@dataclass(slots=True)
class DrillObservations:
    """The observations of one drill."""

    absorbed: Absorbed | None = None
    found_ns: int | None = None
    """Time at which an inspection had detected the fault, nanoseconds."""
    promise: Promise | None = None
    """The limit on the steps that the strike may cost."""
    standby: str = ""
    """The standby that was chosen as a replacement, and failed."""
    damaged: list[Damaged] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    """Machines that lost memory and disk."""
    records: Records = field(default_factory=Records)
    """Step records of machines that were emptied."""
    asked: list[str] = field(default_factory=list)
    """Folders of the code in the drill's update requests."""
    said: set[str] = field(default_factory=set)
    """Problems with backups and disks that the agents reported."""
    lag: int | None = None
    """Most steps that a backup was behind; None: not measured."""
    trouble: str = ""
    """Why the fault could not be injected as planned."""
