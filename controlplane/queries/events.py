"""Lines about incidents for the display of a followed job, from the changes of its workflow's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from everstep.model.incident import IncidentReport
from everstep.model.job_state import IncidentSummary, JobState
from everstep.model.stage import StageRecord

IncidentKind = Literal["opened", "waits", "parked", "resumed", "recovered", "running", "closed"]
"""``waits``: for slow ranks to end; ``running``: the job runs, no step was seen yet; ``closed``: the job ends."""
WAITS = "stop: "
"""Prefix of a stage's text that names what the stage waits for."""


@dataclass(frozen=True, slots=True)
class IncidentEvent:
    """A change of an incident."""

    kind: IncidentKind
    incident: IncidentSummary


@dataclass(slots=True)
class IncidentTracker:
    """Finds the incident events between successive states of a job."""

    _last_told: dict[int, str] = field(default_factory=dict)
    """Number of the incident → ``open``, ``parked`` or ``done``."""
    _waits: dict[int, str] = field(default_factory=dict)
    """Number of the incident → its stage at the last call."""

    def skip_closed(self, state: JobState) -> None:
        """Mark closed incidents as shown: a user who attaches later does not see them."""
        self._last_told |= {incident.number: "done" for incident in state.incidents if incident.resolution}

    def changes(self, state: JobState) -> list[IncidentEvent]:
        """The events since the last call, in order."""
        events: list[IncidentEvent] = []
        for incident in state.incidents:
            before = self._last_told.get(incident.number, "")
            if before == "done":
                continue
            if not before:
                events.append(IncidentEvent("opened", incident))
            if incident.resolution:
                events.append(IncidentEvent(_how_closed(incident), incident))
                self._last_told[incident.number] = "done"
            elif incident.stage == "parked":
                if before != "parked":
                    events.append(IncidentEvent("parked", incident))
                self._last_told[incident.number] = "parked"
            else:
                if before == "parked":
                    events.append(IncidentEvent("resumed", incident))
                if incident.stage.startswith(WAITS) and self._waits.get(incident.number) != incident.stage:
                    events.append(IncidentEvent("waits", incident))
                self._waits[incident.number] = incident.stage
                self._last_told[incident.number] = "open"
        return events


def incident_line(event: IncidentEvent) -> str:
    """One line about an incident event."""
    incident = event.incident
    if event.kind == "waits":
        return f"incident {incident.number:04d}  waits: {incident.stage.removeprefix(WAITS)}"
    verb = {"parked": "parked: ", "resumed": "goes on: "}.get(event.kind, "")
    return f"incident {incident.number:04d}  {verb}{incident.headline}"


def _how_closed(incident: IncidentSummary) -> IncidentKind:
    if not incident.recovered:
        return "closed"
    return "recovered" if incident.confirmed else "running"


def parts_line(report: IncidentReport) -> str:
    """The parts of a recovery with times: ``stop 0.05 s, reattempt 0.10 s, confirm 0.31 s (restore 0.02 s, …)``."""
    parts = timings(report.timings)
    inner = report.confirmation.parts if report.confirmation else {}
    inside = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in inner.items())
    return parts + (f" (from fork: {inside})" if inside else "")


def timings(stages: Sequence[StageRecord]) -> str:
    """Stages with their seconds, in one line."""
    return ", ".join(f"{stage.name} {stage.seconds:.2f} s" for stage in stages)
