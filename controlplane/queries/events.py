"""Events of incidents for the display of a followed job, derived from the changes of the job's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from everstep.model.incident import IncidentReport
from everstep.model.job_state import IncidentSummary, JobState

IncidentKind = Literal["opened", "waits", "parked", "resumed", "recovered", "running", "closed"]
"""``waits``: the incident waits for slow ranks to end; ``running``: the job runs, but is not confirmed; ``closed``: the
job ends."""
WAITS = "stop: "
"""Prefix of the text of a stage that waits; the rest of the text names what the stage waits for."""


@dataclass(frozen=True, slots=True)
class IncidentEvent:
    """A change of an incident."""

    kind: IncidentKind
    incident: IncidentSummary


@dataclass(slots=True)
class IncidentTracker:
    """Derives incident events from successive states of a job."""

    _last_shown: dict[int, str] = field(default_factory=dict)
    """Number of the incident → its state at the last call: ``open``, ``parked`` or ``done``."""
    _waits: dict[int, str] = field(default_factory=dict)
    """Number of the incident → its stage at the last call."""

    def skip_closed(self, state: JobState) -> None:
        """Mark closed incidents as shown, for a user who attaches later."""
        self._last_shown |= {incident.number: "done" for incident in state.incidents if incident.resolution}

    def changes(self, state: JobState) -> list[IncidentEvent]:
        """The events since the last call, in order."""
        events: list[IncidentEvent] = []
        for incident in state.incidents:
            before = self._last_shown.get(incident.number, "")
            if before == "done":
                continue
            if not before:
                events.append(IncidentEvent("opened", incident))
            if incident.resolution:
                events.append(IncidentEvent(_how_closed(incident), incident))
                self._last_shown[incident.number] = "done"
            elif incident.stage == "parked":
                if before != "parked":
                    events.append(IncidentEvent("parked", incident))
                self._last_shown[incident.number] = "parked"
            else:
                if before == "parked":
                    events.append(IncidentEvent("resumed", incident))
                if incident.stage.startswith(WAITS) and self._waits.get(incident.number) != incident.stage:
                    events.append(IncidentEvent("waits", incident))
                self._waits[incident.number] = incident.stage
                self._last_shown[incident.number] = "open"
        return events


def incident_line(event: IncidentEvent) -> str:
    """One line about an incident event."""
    incident = event.incident
    if event.kind == "waits":
        return f"incident {incident.number:04d}  waits: {incident.stage.removeprefix(WAITS)}"
    verb = {"parked": "parked: ", "resumed": "resumed: "}.get(event.kind, "")
    return f"incident {incident.number:04d}  {verb}{incident.headline}"


def _how_closed(incident: IncidentSummary) -> IncidentKind:
    if not incident.recovered:
        return "closed"
    return "recovered" if incident.confirmed else "running"


def parts_line(report: IncidentReport) -> str:
    """The parts of a recovery: ``stop 0.05 s, reattempt 0.10 s, confirm 0.31 s (from fork: restore 0.02 s, …)``."""
    stages = ", ".join(f"{stage.name} {stage.seconds:.2f} s" for stage in report.timings)
    parts = report.confirmation.parts if report.confirmation else {}
    restart = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
    return stages + (f" (from fork: {restart})" if restart else "")
