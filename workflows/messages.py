"""Inputs and results of the workflows."""

from __future__ import annotations

from pydantic import Field
from temporalio.exceptions import ApplicationError

from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import NOT_YET, SHOWN_ALREADY, JobState, ShareTrained
from everstep.model.machine import Machine
from everstep.model.message import Model
from everstep.model.replay import GroupRun

RESTS_ON_STEPS = {Symptom.HANG, Symptom.UNSAVED, Symptom.MACHINE_SILENT}
"""Symptoms of a generation that has completed a step."""


class ReplayCarried(Model):
    """The state of a replay from its earlier runs."""

    repeat: int
    """The number of repeats of both phases so far."""
    began: float
    """The start of the workflow's first run, seconds since the epoch."""
    runs: list[GroupRun] = Field(default_factory=list)
    """The trials of groups, folded (``everstep.decisions.blame.replay.kept_runs``)."""


class ReplayInput(Model):
    """The input of a replay of a job on groups of its machines."""

    job: str
    spec: JobSpec
    machines: list[Machine]
    run: str = ""
    """The id of the job's run; see ``everstep.model.run_id``."""
    why: str = ""
    """Why the replay is the next step, as text."""
    first_step_s: float = 0.0
    """The longest time from a start of the job to its first step, seconds; 0: it is not known."""
    carried: ReplayCarried | None = None
    """The state of a replay that continued as new; None: the replay begins."""


class JobResult(Model):
    """The result of a job. The Web UI shows the fields in this order."""

    headline: str
    outcome: str
    generations: int
    incidents: list[str]


def lost_incident(anomaly: Anomaly, generation: int, why: str) -> IncidentReport:
    """Return the report of an incident that was ended from outside, e.g. terminated in the Web UI."""
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


def check_generation(generation: int) -> None:
    """Refuse an invalid generation.

    Raises:
        ValueError: the number is below 1.
    """
    if generation < 1:
        raise ValueError(f"generation is {generation}; generations start at 1")


def check_report(state: JobState, anomaly: Anomaly) -> None:
    """Refuse a report with an invalid generation, or one that is too early.

    Raises:
        ValueError: the generation is below 1.
        ApplicationError: the generation must be confirmed first; the type is ``NOT_YET``.
    """
    check_generation(anomaly.generation)
    started = anomaly.generation == state.generation and state.status != "starting"
    if anomaly.symptom in RESTS_ON_STEPS and anomaly.generation >= state.generation and not started:
        raise ApplicationError(f"{anomaly.symptom}: generation {anomaly.generation} is not confirmed yet", type=NOT_YET)


def check_trained(state: JobState, share: ShareTrained) -> None:
    """Refuse a share of training time that the job shows already.

    Raises:
        ApplicationError: the job shows it already; the type is ``SHOWN_ALREADY``.
    """
    if (share.ettr, share.last_hour) == (state.ettr, state.ettr_last_hour):
        raise ApplicationError("it is shown already", type=SHOWN_ALREADY)
