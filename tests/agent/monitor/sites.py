"""A simulated machine, made of files, for inspections. A test can also script the looks of an inspection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agent.monitor.inspection import Inspection, InspectionResult, Limits, Site
from agent.monitor.kept import KeptStates
from everstep.model.finding import Health, Owner, Reason, Remedy

BROKEN = Reason("part-broken", "a part is broken", Owner.MACHINE, Remedy.REPLACE, sure=True)
UNCLEAR = Reason("part-unclear", "a part is odd", Owner.UNKNOWN, Remedy.WATCH, Health.UNKNOWN)


@dataclass
class Clock:
    """A wall clock that tests set."""

    ns: int = 1_800_000_000_000_000_000

    def __call__(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


@dataclass
class SimulatedMachine:
    """A machine: its folders, its clock, and the kept states of its inspections."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    boot: str = "boot-1"

    def site(self, **more: Any) -> Site:
        """Return the machine as inspections get it; ``more`` replaces or adds fields."""
        for name in ("state", "shm"):
            (self.folder / name).mkdir(exist_ok=True)
        where: dict[str, Any] = {
            "state_dir": self.folder / "state",
            "shm_dir": self.folder / "shm",
            "now_ns": self.clock,
        }
        return Site(**(where | more))

    def kept(self) -> KeptStates:
        """Return the kept states that a newly started agent finds."""
        return KeptStates(self.folder, boot=self.boot)

    def begin(self, kind: type[Inspection], limits: Limits | None = None, **site: Any) -> Inspection:
        """Return an inspection of a newly started agent."""
        kept = self.kept()
        return kind(self.site(**site), limits or kind.limits_type(), kept.of(kind.name), same_boot=kept.same_boot)

    def inspect(self, inspection: Inspection) -> InspectionResult:
        """Let an inspection look once and keep its state. Returns the result."""
        seen = inspection.inspect()
        self.kept().keep(inspection.name, inspection.kept)
        return seen


class Scripted(Inspection):
    """An inspection whose looks a test chooses."""

    name: ClassVar[str] = "scripted"
    inspects: ClassVar[str] = "what a test says"
    reasons: ClassVar[tuple[Reason, ...]] = (BROKEN, UNCLEAR)
    does: Callable[[], InspectionResult]

    def inspect(self) -> InspectionResult:
        """Return what the test wants."""
        return self.does()


def scripted(machine: SimulatedMachine, does: Callable[[], InspectionResult], **limits: float) -> Scripted:
    """Return an inspection whose looks call ``does``."""
    inspection = Scripted(machine.site(), Limits(**({"interval_s": 0.01} | limits)), {}, same_boot=True)
    inspection.does = does
    return inspection


def reasons(result: InspectionResult) -> list[tuple[str, str]]:
    """Return the reason code and the part of each finding."""
    return [(found.reason, found.item) for found in result.findings]
