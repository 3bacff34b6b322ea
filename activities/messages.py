"""Inputs and results of the activities. They are stored in histories: fields are only added, with defaults."""

from __future__ import annotations

from pydantic import Field

from everstep.incident import Anomaly, Confirmation, Evidence, IncidentReport, Launched, Model
from everstep.job import JobSpec
from everstep.machine import Machine

PREPARE = "Prepare machines"
STOP = "Stop ranks"
LAUNCH = "Launch ranks"
CONFIRM = "Confirm steps"
RELEASE = "Release machines"
DECIDE = "Decide"
RECORD = "Record job"


class PrepareInput(Model):
    """Start the fork servers."""

    spec: JobSpec
    machines: list[Machine]


class StopInput(Model):
    """Stop every rank up to a generation, and bring back what the machines know."""

    job: str
    generation: int
    machines: list[Machine]
    grace_s: float = 0.0
    patience_s: float = 30.0
    """How long a silent agent is asked again, seconds (ours)."""


class LaunchInput(Model):
    """Start all ranks of a generation."""

    spec: JobSpec
    machines: list[Machine]
    generation: int
    resume_step: int
    reason: str = ""
    patience_s: float = 30.0


class ConfirmInput(Model):
    """Watch until every rank of a generation completed a step."""

    spec: JobSpec
    machines: list[Machine]
    launched: Launched


class ReleaseInput(Model):
    """Give back what a job holds on its machines."""

    job: str
    machines: list[Machine]


class DecideInput(Model):
    """Write one conclusion of an incident into the ledger; its first entry opens the incident."""

    incident: str
    job: str
    anomaly: Anomaly
    opened_ns: int
    position: int
    """Place of this entry within the incident, from 1: what makes a repeated write harmless."""
    time_ns: int
    stage: str
    text: str
    evidence: Evidence | None = None
    launched: Launched | None = None
    report: IncidentReport | None = None
    """Given with the last entry: closes the incident."""
    parked: list[tuple[int, int]] = Field(default_factory=list)
    """When the job was parked, begin and end in nanoseconds."""


class RecordInput(Model):
    """Write the state of a job into the ledger."""

    spec: JobSpec
    time_ns: int
    started_ns: int = 0
    """Given with the first entry: opens a run of the job."""
    launched: Launched | None = None
    confirmation: Confirmation | None = None
    outcome: str = ""
    """Given when the job ended."""
