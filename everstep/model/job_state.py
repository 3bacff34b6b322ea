"""The state of a job, as its workflow keeps it and answers it to the query ``state``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from everstep.model.finding import MachineFinding
from everstep.model.incident import Anomaly, Failure, IncidentReport
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.ladder import Tried
from everstep.model.launch import Showing
from everstep.model.machine import Machine
from everstep.model.message import AnyWord, Model
from everstep.model.stage import NOT_CONFIRMED, Stage
from everstep.model.version import JobVersion

LOOKED_INTO = "running, slow"
"""Status of a job that goes on while it is looked at which machine slows it down."""

JobStatus = Annotated[
    Literal["starting", "running", "recovering", "parked", "stopping", "finished", "failed", "stopped"], AnyWord
]

TASK_QUEUE = "everstep"
"""Where nothing else is said, as in deployments with one cluster in a namespace of Temporal. A local cluster has its
own."""

NOT_YET = "NotYet"
"""Type of the error by which a job's workflow refuses a report that it may take later."""

SHOWN_ALREADY = "ShownAlready"
"""Type of the error by which it refuses what another worker has told it."""


def job_workflow_id(job: str) -> str:
    """Id of a job's workflow."""
    return f"job/{job}"


def jobs_query(task_queue: str, condition: str) -> str:
    """Temporal's list query for the jobs of one cluster: others in the same namespace have other workers and machines.

    Args:
        task_queue: Of the cluster.
        condition: In Temporal's list filter.
    """
    return f'WorkflowType="Job" AND TaskQueue="{task_queue}" AND {condition}'


def replay_workflow_id(job: str, incident: int, number: int) -> str:
    """Id of the workflow of an incident's replay; both numbers start at 1."""
    return f"replay/{job}/{incident:04d}-{number}"


def incident_workflow_id(job: str, number: int) -> str:
    """Id of an incident's workflow; numbers start at 1."""
    return f"incident/{job}/{number:04d}"


class IncidentSummary(Model):
    """One line about an incident."""

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
    """Where the job went on: it was seen to step."""

    def closed(self, report: IncidentReport) -> IncidentSummary:
        """The line about it once it is over."""
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
    """Which copies the last run of a job's name took for its own."""

    run: str = ""
    """Its id; empty: not known."""
    origin_runs: list[str] = Field(default_factory=list)
    lineage: list[tuple[int, int]] = Field(default_factory=list)


class ShareTrained(Model):
    """Which share of its time a job trained, 0 to 1 (ETTR; ByteRobust, section 4.2); None: not known."""

    ettr: float | None = None
    """Since its start."""
    last_hour: float | None = None

    @classmethod
    def shown(cls, ettr: float | None, last_hour: float | None) -> ShareTrained:
        """In whole percent: what a workflow shows changes its history, and that of a job that is parked for a week is
        to stay short."""
        ratios = (None if ratio is None else round(ratio, 2) for ratio in (ettr, last_hour))
        return cls(ettr=next(ratios), last_hour=next(ratios))


class JobState(BaseModel):
    """Everything that a job's workflow carries across continue-as-new; the workflow changes it in place."""

    # What a newer release keeps here survives a time in which an older one has the job.
    model_config = ConfigDict(extra="allow")

    spec: JobSpec
    machines: list[Machine]
    run: str = ""
    """Id of this submission of the job's name, the same across continue-as-new; empty: it began before there were ids.
    See ``everstep.model.run_id``."""
    origin_runs: list[str] = Field(default_factory=list)
    """Ids of the earlier runs whose copies it was started from; empty: of none, or not known."""
    earlier: EarlierRun = Field(default_factory=EarlierRun)
    """The last run of the name, where the job is to start from what it left."""
    generation: int = 0
    """Newest generation launched; 0: none yet."""
    resume_step: int = -1
    """Where the newest generation began; -1: the script restores by itself."""
    resume_from: int | None = None
    """Completed steps that the job starts with, from what an earlier run of its name left; None: from the beginning."""
    resume_path: str = ""
    """Folder of a disk checkpoint that it starts from, saved with any parallel sizes; empty: none."""
    resume_path_step: int = -1
    """Completed steps of that checkpoint; -1: not known yet."""
    lineage: list[tuple[int, int]] = Field(default_factory=list)
    """Of each generation: its number and where it began; see ``everstep.decisions.keep.lineage``."""
    backups: str = ""
    """Where the backups lie and what may be lost with their owners, for people."""
    status: JobStatus = "starting"
    versions: list[JobVersion] = Field(default_factory=list)
    """Of its code, in order, the last ones; ``spec.version`` runs. Empty: it began before there were versions."""
    incidents: list[IncidentSummary] = Field(default_factory=list, description="The last 20, oldest first.")
    incident_count: int = 0
    """Number of the newest incident of the job's name: it counts on from run to run."""
    incidents_before: int = 0
    """Of which so many were of earlier runs."""
    failures: list[Failure] = Field(default_factory=list, description="For the next decision, bounded.")
    pending: list[Anomaly] = Field(default_factory=list)
    observed: list[Anomaly] = Field(default_factory=list)
    """Faults with which the job goes on, that no incident has told yet."""
    observed_told: dict[str, int] = Field(default_factory=dict)
    """Machine, part and reason of such faults → when they were told, nanoseconds."""
    unconfirmed: str = ""
    """Why the newest generation runs and is not confirmed: no step of it was seen; empty: it stepped, or it does not
    run."""
    confirm_by_ns: int = 0
    """Until when the newest generation has to step, where no incident waits for that; 0: nothing is to wait for."""
    showing: Showing = Field(default_factory=Showing)
    """How the script shows its steps, as far as it was seen."""
    first_step_s: float = 0.0
    """The longest that a start took from its launch to the first step of all ranks; 0: none came so far."""
    closed_outside: int = 0
    """Incidents of the fault at hand that were closed from outside, one after the other."""
    alerts: list[MachineFinding] = Field(default_factory=list)
    """Network alerts of its machines, the last ones: the second of a machine evicts it."""
    evicted_ns: list[int] = Field(default_factory=list)
    """When machines were taken out of it without an operator: one entry for each machine, the last ones."""
    tried: list[Tried] = Field(default_factory=list)
    """What its last incidents tried, rung by rung of the ladder: the next one for the same fault starts higher."""
    left: list[str] = Field(default_factory=list)
    """Machines that it has left, the last ones."""
    hold: str = ""
    """Why the next incident waits for an operator before it launches anything; empty: it need not."""
    emptied: list[str] = Field(default_factory=list)
    """Machines of which a closed incident heard that they lost what they had."""
    started_ns: int = 0
    unproductive_s: float = 0.0
    """Seconds without progress: launches, recoveries and lost steps (section 4.2 of ByteRobust defines ETTR)."""
    ettr: float | None = None
    """Share of its time in which it trained, 0 to 1, as workers said last; None: not known yet."""
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
        if self.status == "recovering" and any(one.stage == Stage.VOTE for one in self.incidents):
            return LOOKED_INTO  # it goes on meanwhile
        return NOT_CONFIRMED if self.status == "running" and self.unconfirmed else self.status

    @property
    def launched(self) -> bool:
        """Whether it got as far as a launch; until then agents and ledger know of earlier runs of its name only."""
        return bool(self.lineage)

    @property
    def placed(self) -> PlacedJob:
        """The job with its machines, as activities have it."""
        return PlacedJob(spec=self.spec, machines=self.machines, run=self.run)
