"""The injector's observations during a drill, for the judge."""

from __future__ import annotations

from dataclasses import dataclass, field

from drills.observe.step_records import Records
from drills.observe.stored_copies import Damaged
from drills.spec.loss import Promise


@dataclass(frozen=True, slots=True)
class Absence:
    """The time in which a part that is no rank was dead, hung or cut off."""

    began_ns: int
    back_ns: int | None
    """Time at which the part worked again, nanoseconds; None: it did not work within the limit."""


@dataclass(slots=True)
class DrillObservations:
    """The injector's observations in one drill."""

    absence: Absence | None = None
    detected_ns: int | None = None
    """Time at which inspections of all struck machines had detected the fault, nanoseconds."""
    promise: Promise | None = None
    """The limit on the steps that the strike may cost."""
    standby: str = ""
    """A standby that was chosen as a replacement and failed; empty: none."""
    damaged: list[Damaged] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    """Machines that lost memory and disk."""
    records: Records = field(default_factory=Records)
    """Step records of machines that were emptied."""
    update_folders: list[str] = field(default_factory=list)
    """Folders of the code that the drill's update requests named, in order."""
    reported: set[str] = field(default_factory=set)
    """Problems with backups and disks that agents reported."""
    lag: int | None = None
    """The largest number of steps by which a backup was behind; None: not measured."""
    trouble: str = ""
    """Why the fault could not be injected as planned; empty: it could."""
