"""Defines the state of a job, which its workflow keeps and returns for the query ``state``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from everstep.model.finding import MachineFinding
from everstep.model.incident import Anomaly, Failure, IncidentReport
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.ladder import TriedRung
from everstep.model.launch import Showing
from everstep.model.machine import Machine
from everstep.model.message import AnyWord, Model
from everstep.model.stage import NOT_CONFIRMED, Stage
from everstep.model.version import JobVersion

RUNNING_SLOW = "running, slow"
"""Status of a job that keeps running while a vote looks for the machine that slows it down."""

JobStatus = Annotated[
    Literal["starting", "running", "recovering", "parked", "stopping", "finished", "failed", "stopped"], AnyWord
]

TASK_QUEUE = "everstep"
"""The default task queue, for a deployment whose Temporal namespace has one cluster. Local clusters have their own."""

NOT_YET = "NotYet"
"""Type of the error by which a job's workflow refuses a report that it may accept later."""

SHOWN_ALREADY = "ShownAlready"
"""Type of the error by which a job's workflow refuses a report that another worker has made."""


def job_workflow_id(job: str) -> str:
    """Id of a job's workflow."""
    return f"job/{job}"


def jobs_query(task_queue: str, condition: str) -> str:
    """Temporal's list query for the jobs of one cluster, since other clusters may use the same namespace.

    Args:
        task_queue: Task queue of the cluster.
        condition: A condition of Temporal's list filter.
    """
    return f'WorkflowType="Job" AND TaskQueue="{task_queue}" AND {condition}'


def replay_workflow_id(job: str, incident: int, number: int) -> str:
    """Id of the workflow of an incident's replay; both numbers start at 1."""
    return f"replay/{job}/{incident:04d}-{number}"


def incident_workflow_id(job: str, number: int) -> str:
    """Id of an incident's workflow; numbers start at 1."""
    return f"incident/{job}/{number:04d}"


class IncidentSummary(Model):
    """One line of a job's list of incidents."""

    id: str
    number: int
    headline: str
    resolution: str = ""
    """Empty while the incident is open."""
    recovered: bool = False
    step: int = -1
    lost_steps: int | None = None
    seconds: float | None = None
    opened_ns: int = 0
    stage: str = ""
    confirmed: bool = True
    """Whether the job was seen to step again, if it runs again."""

    def closed(self, report: IncidentReport) -> IncidentSummary:
        """The summary of the incident once it is closed."""
        changes = {
            "headline": report.headline,
            "resolution": report.resolution,
            "recovered": report.recovered,
            "confirmed": report.confirmed,
            "step": report.step,
            "lost_steps": report.lost_steps,
            "seconds": report.seconds,
            "stage": "",
        }
        return self.model_copy(update=changes)


class EarlierRun(Model):
    """The last run of a job's name, with the generations and earlier runs that identify its copies."""

    run: str = ""
    """Id of the run; empty: not known."""
    origin_runs: list[str] = Field(default_factory=list)
    lineage: list[tuple[int, int]] = Field(default_factory=list)


class ShareTrained(Model):
    """The share of its time in which a job trained, 0 to 1 (ETTR; ByteRobust, section 4.2); None: not known."""

    ettr: float | None = None
    """The share since its start."""
    last_hour: float | None = None

    @classmethod
    def shown(cls, ettr: float | None, last_hour: float | None) -> ShareTrained:
        """The shares, rounded to whole percent.

        They are rounded because each change adds to the workflow's history, which has to stay short even for a job that
        is parked for a week.
        """
        ratios = (None if ratio is None else round(ratio, 2) for ratio in (ettr, last_hour))
        return cls(ettr=next(ratios), last_hour=next(ratios))


class JobState(BaseModel):
    """All that a job's workflow keeps across continue-as-new; the workflow changes it in place."""

    # Fields that a newer release added survive while workers of an older release run the job.
    model_config = ConfigDict(extra="allow")

    spec: JobSpec
    machines: list[Machine]
    run: str = ""
    """Id of the run, the same across continue-as-new (``everstep.model.run_id``)."""
    origin_runs: list[str] = Field(default_factory=list)
    """Ids of the earlier runs whose copies the job was started from; empty: none, or not known."""
    earlier: EarlierRun = Field(default_factory=EarlierRun)
    """The last run of the name, if the job has to start from its copies."""
    generation: int = 0
    """Newest generation launched; 0: none yet."""
    resume_step: int = -1
    """The step from which the newest generation began; -1: the script restores by itself."""
    save_every: int = 0
    """After how many steps its ranks saved when they were stopped last; 0: not known."""
    resume_from: int | None = None
    """Completed steps with which the job starts, from copies of an earlier run; None: it starts from the beginning."""
    resume_path: str = ""
    """Folder of a disk checkpoint from which it starts, saved with any parallel sizes; empty: none."""
    resume_path_step: int = -1
    """Completed steps of that checkpoint; -1: not known yet."""
    lineage: list[tuple[int, int]] = Field(default_factory=list)
    """Number and first step of each generation (``everstep.decisions.keep.lineage``)."""
    backups: str = ""
    """For people: where the backups are, and which failures lose a copy together with its backup."""
    status: JobStatus = "starting"
    versions: list[JobVersion] = Field(default_factory=list)
    """The last versions of its code, in order; ``spec.version`` is the number of the running one."""
    incidents: list[IncidentSummary] = Field(default_factory=list, description="The last 20, oldest first.")
    incident_count: int = 0
    """Number of the newest incident of the job's name; a new run continues the count."""
    incidents_before: int = 0
    """Number of the newest incident of earlier runs."""
    failures: list[Failure] = Field(default_factory=list, description="The last failures, for later decisions.")
    pending: list[Anomaly] = Field(default_factory=list)
    observed: list[Anomaly] = Field(default_factory=list)
    """Faults with which the job keeps running, and for which no incident was opened yet."""
    observed_told: dict[str, int] = Field(default_factory=dict)
    """Machine, part and reason of such a fault → when an incident reported it, nanoseconds."""
    unconfirmed: str = ""
    """Why the running generation is not confirmed, since no step was seen; empty: it is confirmed, or none runs."""
    confirm_by_ns: int = 0
    """Deadline for a step of the newest generation, nanoseconds, if no incident waits for it; 0: none is expected."""
    showing: Showing = Field(default_factory=Showing)
    """How the script shows its steps, as far as known."""
    first_step_s: float = 0.0
    """The longest time from a launch to the first step of all ranks, seconds; 0: none has stepped yet."""
    closed_outside: int = 0
    """Number of incidents of the current fault that were closed from outside, one after the other."""
    alerts: list[MachineFinding] = Field(default_factory=list)
    """The last network alerts of the job's machines. The second alert of a machine evicts the machine."""
    evicted_ns: list[int] = Field(default_factory=list)
    """The times of the last evictions that count for the breaker, nanoseconds."""
    tried: list[TriedRung] = Field(default_factory=list)
    """The rungs of the ladder that its last incidents tried. The next incident of the same fault starts at a higher
    rung."""
    left: list[str] = Field(default_factory=list)
    """The last machines that left the job."""
    hold: str = ""
    """Why the next incident waits for an operator before it launches anything; empty: it does not wait."""
    emptied: list[str] = Field(default_factory=list)
    """Machines that lost their memory, according to a closed incident."""
    started_ns: int = 0
    unproductive_s: float = 0.0
    """Seconds without progress: launches, recoveries and lost steps (section 4.2 of ByteRobust defines ETTR)."""
    ettr: float | None = None
    """Share of its time in which it trained, 0 to 1, as workers last reported it; None: not known yet."""
    ettr_last_hour: float | None = None
    rejected: list[str] = Field(default_factory=list, description="Messages that made no sense, the last 10.")
    stop_requested: str = ""
    outcome: str = ""
    """Why the job ended; empty while it runs."""

    @property
    def incidents_so_far(self) -> int:
        """Incidents of this run."""
        return self.incident_count - self.incidents_before

    @property
    def status_text(self) -> str:
        """The status for people."""
        if self.status == "recovering" and any(incident.stage == Stage.VOTE for incident in self.incidents):
            return RUNNING_SLOW  # its ranks run during the vote
        return NOT_CONFIRMED if self.status == "running" and self.unconfirmed else self.status

    @property
    def launched(self) -> bool:
        """Whether this run was launched; until then agents and ledger know only earlier runs of the name."""
        return bool(self.lineage)

    @property
    def placed(self) -> PlacedJob:
        """The job with its machines, as activities receive it."""
        return PlacedJob(spec=self.spec, machines=self.machines, run=self.run)
