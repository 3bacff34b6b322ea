"""Inputs and results of the workflows."""

from __future__ import annotations

from pydantic import Field

from everstep.incident import Anomaly, Failure, IncidentReport, Model, Showing
from everstep.job import JobSpec
from everstep.machine import Machine


class IncidentInput(Model):
    """What an incident starts from."""

    job: str
    number: int
    anomaly: Anomaly
    generation: int
    resume_step: int
    """Where the failed generation had begun; -1: the script restores by itself."""
    spec: JobSpec
    machines: list[Machine]
    history: list[Failure]
    opened_ns: int
    lineage: list[tuple[int, int]] = Field(default_factory=list)
    """The job's line of generations; see ``everstep.decisions.lineage``."""
    resume_path: str = ""
    """Folder of the disk checkpoint from which the job was started first; empty: none."""
    resume_path_step: int = -1
    run: str = ""
    """Id of the job's run; see ``everstep.run_id``."""
    origin_runs: list[str] = Field(default_factory=list)
    """Ids of the earlier runs whose copies the job was started from."""
    showing: Showing = Field(default_factory=Showing)
    """How the script showed its steps before."""
    first_step_s: float = 0.0
    """The longest that a start took to the first step; 0: none came so far."""
    hold: str = ""
    """Why the incident waits for an operator before it launches anything; empty: it does not."""
    emptied: list[str] = Field(default_factory=list)
    """Machines that lost what they had, of which an incident of the same fault was told before."""


class JobResult(Model):
    """How a job ended. Field order is the order shown."""

    headline: str
    outcome: str
    generations: int
    incidents: list[str]


def lost_incident(anomaly: Anomaly, generation: int, why: str) -> IncidentReport:
    """The report of an incident that was ended from outside, e.g. terminated in the Web UI."""
    return IncidentReport(
        headline=f"Incident ended from outside ({why}): {anomaly.headline}",
        resolution="abandoned",
        cause=str(anomaly.symptom),
        step=-1,
        lost_steps=None,
        evicted=[],
        stages=[],
        generation=generation,
        recovered=False,
        seconds=None,
        failures=[],
    )
