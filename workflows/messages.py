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
"""Symptoms that a generation can have only after it has completed a step."""


class ReplayCarried(Model):
    """What a replay took along from its earlier runs."""

    repeat: int
    """So often both phases were run."""
    began: float
    """When the first run of the workflow began, seconds since the epoch."""
    runs: list[GroupRun] = Field(default_factory=list)
    """Of groups, folded (``everstep.decisions.blame.replay.kept_runs``)."""


class ReplayInput(Model):
    """Replay a job on groups of its machines."""

    job: str
    spec: JobSpec
    machines: list[Machine]
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""
    why: str = ""
    """Why its turn has come, for people."""
    first_step_s: float = 0.0
    """The longest that a start of the job took to the first step; 0: not known."""
    carried: ReplayCarried | None = None
    """Of a replay that continued as new; None: it begins."""


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


def check_generation(generation: int) -> None:
    """Refuse a number that no generation has.

    Raises:
        ValueError: it is below 1.
    """
    if generation < 1:
        raise ValueError(f"generation is {generation}; generations start at 1")


def check_report(state: JobState, anomaly: Anomaly) -> None:
    """Refuse a report of what is no generation, or cannot be known yet.

    Raises:
        ValueError: the generation is below 1.
        ApplicationError: the generation has to be confirmed first; of type ``NOT_YET``.
    """
    check_generation(anomaly.generation)
    started = anomaly.generation == state.generation and state.status != "starting"
    if anomaly.symptom in RESTS_ON_STEPS and anomaly.generation >= state.generation and not started:
        raise ApplicationError(f"{anomaly.symptom}: generation {anomaly.generation} is not confirmed yet", type=NOT_YET)


def check_trained(state: JobState, share: ShareTrained) -> None:
    """Refuse a share of its time that the job shows already.

    Raises:
        ApplicationError: it does; of type ``SHOWN_ALREADY``.
    """
    if (share.ettr, share.last_hour) == (state.ettr, state.ettr_last_hour):
        raise ApplicationError("it is shown already", type=SHOWN_ALREADY)
