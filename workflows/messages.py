"""Inputs and results of the workflows."""

from __future__ import annotations

from pydantic import Field
from temporalio.exceptions import ApplicationError

from everstep.model.eviction import EvictionState
from everstep.model.finding import MachineFinding
from everstep.model.hang import HangFound
from everstep.model.incident import Anomaly, Failure, IncidentReport, Symptom
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.job_state import NOT_YET, SHOWN_ALREADY, JobState, ShareTrained
from everstep.model.ladder import Rung, Tried
from everstep.model.launch import Launched, Showing
from everstep.model.machine import Machine
from everstep.model.message import Model
from everstep.model.replay import GroupRun
from everstep.model.slow import SlowFound
from everstep.model.stage import StageRecord
from everstep.model.state_copy import StateCopy
from everstep.model.version import JobVersion

RESTS_ON_STEPS = {Symptom.HANG, Symptom.UNSAVED, Symptom.MACHINE_SILENT}
"""Symptoms that a generation can have only after it has completed a step."""


class Carried(Model):
    """What an incident took along from its earlier runs, beside what its input has anyway."""

    resumed: bool = False
    """It was parked, and an operator said that it is to try again; False: a reattempt has failed."""
    came_back: bool = False
    """It was parked, and the machines answer again that it waited for."""
    failures: list[Failure] = Field(default_factory=list)
    attempts: int = 0
    failed_restores: int = 0
    asked: int = 0
    launched: Launched | None = None
    resumed_by: str = ""
    launches: list[tuple[int, int]] = Field(default_factory=list)
    """Its launches: the number of each generation and where it began."""
    bad: list[StateCopy] = Field(default_factory=list)
    unreached: list[StateCopy] = Field(default_factory=list)
    farthest: int = -1
    lost_from: int = -1
    lost_steps: int | None = None
    nobody_knows: bool = False
    accepted_from: int | None = None
    accepted: str = ""
    headline: str = ""
    stages: list[StageRecord] = Field(default_factory=list)
    rejected: list[str] = Field(default_factory=list)
    parked: list[tuple[int, int]] = Field(default_factory=list)
    noted: int = 0
    trusted: int | None = None
    version_changes: list[tuple[int, str, str]] = Field(default_factory=list)
    """Numbers of the versions that came, why, and why the ones before were suspect."""
    versions_changed: list[int] = Field(default_factory=list)
    """Numbers of the versions of which it has something to say."""
    evictions: EvictionState = Field(default_factory=EvictionState)
    tried: list[Tried] = Field(default_factory=list)
    """Rungs of the ladder, since an operator resumed."""
    all_tried: list[Tried] = Field(default_factory=list)
    """The same of the whole incident, the last ones."""
    begun_again_ns: int = 0
    """When an operator resumed it, or it went on for other code, the last time."""
    tested: list[MachineFinding] = Field(default_factory=list)
    """What stop-time tests found."""
    approved: list[Rung] = Field(default_factory=list)
    """Rungs that an operator let go on."""
    hang: HangFound | None = None
    slow: SlowFound | None = None
    """What looks at the ranks showed; None: nobody looked."""


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
    """The job's line of generations; see ``everstep.decisions.keep.lineage``."""
    resume_path: str = ""
    """Folder of the disk checkpoint from which the job was started first; empty: none."""
    resume_path_step: int = -1
    run: str = ""
    """Id of the job's run; see ``everstep.model.run_id``."""
    origin_runs: list[str] = Field(default_factory=list)
    """Ids of the earlier runs whose copies the job was started from."""
    showing: Showing = Field(default_factory=Showing)
    """How the script showed its steps before."""
    first_step_s: float = 0.0
    """The longest that a start took to the first step; 0: none came so far."""
    hold: str = ""
    """Why the incident waits for an operator before it launches anything; empty: it does not."""
    emptied: list[str] = Field(default_factory=list)
    """Machines that lost what they had, as an earlier incident of the same fault learned."""
    alerts: list[MachineFinding] = Field(default_factory=list)
    """Network alerts of the job's machines, told before."""
    evicted_ns: list[int] = Field(default_factory=list)
    """When machines were taken out of the job without an operator, one entry for each machine."""
    versions: list[JobVersion] = Field(default_factory=list)
    """Of the job's code; empty: none are known."""
    tried: list[Tried] = Field(default_factory=list)
    """Rungs of the ladder that earlier incidents of the job tried."""
    only_tells: bool = False
    """It does nothing about what it tells, and the job does not wait for it."""
    carried: Carried | None = None
    """Of an incident that continued as new; None: it begins."""

    @property
    def placed(self) -> PlacedJob:
        """The job with its machines, as activities have it."""
        return PlacedJob(spec=self.spec, machines=self.machines, run=self.run)


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
