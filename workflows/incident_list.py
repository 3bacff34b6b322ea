"""The list of incidents in a job's state, with a line about each."""

from __future__ import annotations

from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job_state import IncidentSummary, JobState, incident_workflow_id
from everstep.model.stage import Stage

INCIDENTS_KEPT = 20


def opened(state: JobState, anomaly: Anomaly) -> int:
    """Note that an incident was opened; returns its number."""
    state.incident_count += 1
    number = state.incident_count
    line = IncidentSummary(
        id=incident_workflow_id(state.spec.name, number),
        number=number,
        headline=anomaly.headline,
        opened_ns=anomaly.seen_ns,
        stage=Stage.VOTE if anomaly.symptom is Symptom.SLOW else "",
    )
    state.incidents = [*state.incidents, line][-INCIDENTS_KEPT:]
    return number


def at_stage(state: JobState, number: object, stage: str) -> bool:
    """Note the stage of an incident; returns whether that incident is open."""
    known = [one for one in state.incidents if one.number == number and not one.resolution]
    for one in known:
        _replace(state, one.model_copy(update={"stage": stage}))
    return bool(known)


def is_open(state: JobState, number: object) -> bool:
    """Return whether the incident with a number is open."""
    return any(one.number == number and not one.resolution for one in state.incidents)


def closed(state: JobState, number: int, report: IncidentReport) -> None:
    """Close the line of an incident with its report."""
    for one in [one for one in state.incidents if one.number == number]:
        _replace(state, one.closed(report))


def _replace(state: JobState, line: IncidentSummary) -> None:
    state.incidents = [line if known.number == line.number else known for known in state.incidents]
