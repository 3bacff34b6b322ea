"""Inputs and results of the workflows."""

from __future__ import annotations

from everstep.incident import Anomaly, Failure, Model
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


class JobResult(Model):
    """How a job ended. Field order is the order shown."""

    headline: str
    outcome: str
    generations: int
    incidents: list[str]
