"""What is worth a line while a job is followed: told from one state of its workflow to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from everstep.model.incident import IncidentReport, StageRecord
from everstep.model.job_state import IncidentSummary, JobState

IncidentKind = Literal["opened", "waits", "parked", "resumed", "recovered", "running", "closed"]
"""``waits``: for ranks that take long to die; ``running``: it goes on and was not seen to step; ``closed``: it ends."""
WAITS = "stop: "
"""How a stage begins that says for whom it waits."""


@dataclass(frozen=True, slots=True)
class IncidentEvent:
    """Something happened to an incident."""

    kind: IncidentKind
    incident: IncidentSummary


@dataclass(slots=True)
class IncidentTeller:
    """Finds the incident events between successive states of a job."""

    _told: dict[int, str] = field(default_factory=dict)
    """Number of the incident → ``open``, ``parked`` or ``done``."""
    _waits: dict[int, str] = field(default_factory=dict)
    """Number of the incident → its stage when it was last looked at."""

    def skip_closed(self, state: JobState) -> None:
        """Consider what is over already as told: for one who comes later."""
        self._told |= {one.number: "done" for one in state.incidents if one.resolution}

    def changes(self, state: JobState) -> list[IncidentEvent]:
        """The events since the last call, in order."""
        events: list[IncidentEvent] = []
        for one in state.incidents:
            before = self._told.get(one.number, "")
            if before == "done":
                continue
            if not before:
                events.append(IncidentEvent("opened", one))
            if one.resolution:
                events.append(IncidentEvent(_how_closed(one), one))
                self._told[one.number] = "done"
            elif one.stage == "parked":
                if before != "parked":
                    events.append(IncidentEvent("parked", one))
                self._told[one.number] = "parked"
            else:
                if before == "parked":
                    events.append(IncidentEvent("resumed", one))
                if one.stage.startswith(WAITS) and self._waits.get(one.number) != one.stage:
                    events.append(IncidentEvent("waits", one))
                self._waits[one.number] = one.stage
                self._told[one.number] = "open"
        return events


def incident_line(event: IncidentEvent) -> str:
    """One line about an incident event."""
    one = event.incident
    if event.kind == "waits":
        return f"incident {one.number:04d}  waits: {one.stage.removeprefix(WAITS)}"
    verb = {"parked": "parked: ", "resumed": "resumed by an operator: "}.get(event.kind, "")
    return f"incident {one.number:04d}  {verb}{one.headline}"


def _how_closed(one: IncidentSummary) -> IncidentKind:
    if not one.recovered:
        return "closed"
    return "recovered" if one.confirmed else "running"


def parts_line(report: IncidentReport) -> str:
    """Where the time of a recovery went: ``stop 0.05 s, reattempt 0.10 s, confirm 0.31 s (restore 0.02 s, …)``."""
    parts = timings(report.timings)
    inner = report.confirmation.parts if report.confirmation else {}
    inside = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in inner.items())
    return parts + (f" (from fork: {inside})" if inside else "")


def timings(stages: Sequence[StageRecord]) -> str:
    """Stages with their seconds, in one line."""
    return ", ".join(f"{stage.name} {stage.seconds:.2f} s" for stage in stages)
