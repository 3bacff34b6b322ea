"""Defines the record of a cluster's machine pool: leases, standbys, quarantine.

Each cluster has one workflow, ``pool/<task queue>``, that owns this record (``workflows.pool``).
These models are stored in histories, so fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from everstep.model.eviction import Eviction
from everstep.model.machine import Machine
from everstep.model.message import Model, Words

RETURNS_KEPT = 1000
"""The largest number of returned machines that wait for the ledger."""
POOL_WORKFLOW = "StandbyPool"
"""Type of the workflow that owns the machines of a cluster."""


def pool_workflow_id(task_queue: str) -> str:
    """Id of the workflow that owns the machines of a cluster."""
    return f"pool/{task_queue}"


class PoolPlace(Words):
    """The status of a machine in the pool."""

    ACTIVE = "active"
    """A job has leased the machine."""
    STANDBY = "standby"
    """The machine is checked and kept for replacement."""
    FREE = "free"
    """No job has leased the machine, and it is not kept as a standby: jobs that start can lease it."""
    PROVISIONING = "provisioning"
    """The machine is new in the list of the cluster and was not inspected yet. It replaces no machine before that."""
    CORDONED = "cordoned"
    """An operator keeps the machine away from jobs."""
    QUARANTINED = "quarantined"
    """The machine was evicted. It returns when it passes its tests, or when an operator releases it."""


class PoolMachine(Model):
    """A machine of the cluster."""

    machine: Machine
    place: PoolPlace
    job: str = ""
    """The job that has leased the machine, or from which it was evicted; empty: none."""
    run: str = ""
    """Id of that job's run."""
    since_ns: int = 0
    by: str = ""
    """The job, incident, operator or pool that put the machine into this place."""
    why: str = ""
    evicted_ns: list[int] = Field(default_factory=list)
    """When the machine was evicted, the last 10 times."""
    uncleaned: bool = False
    """Ranks of the job from which it was evicted may still live there."""
    wanted_out: bool = False
    """An operator wants the machine cordoned as soon as its job leaves it."""
    fault: str = ""
    """Why the machine cannot be used, according to the newest poll; empty: it can be used."""
    passed: int = 0
    """Number of polls in a row without a fault, in quarantine."""
    until_released: bool = False
    """The machine stays in quarantine until an operator releases it, since only a test of a stopped machine shows its
    fault."""
    unlisted_ns: int = 0
    """Since when the machine is missing in the list of the cluster; 0: it is listed, or the list is not known."""
    absent: int = 0
    """Number of polls in a row in which its job did not name it."""
    ready: dict[str, str] = Field(default_factory=dict)
    """The last versions of jobs' code that were tried there: id → why it failed; empty: it did not fail."""


class LeaseRequest(Model):
    """A starting job leases machines, by name. A repeated request of the same run gets the same lease."""

    job: str
    run: str
    machines: list[Machine]


class Leased(Model):
    """The answer to a lease: all machines that the job named, or none."""

    refused: dict[str, str] = Field(default_factory=dict)
    """Machine → why the job cannot have it; empty: the job has them all."""
    may_change: bool = False
    """The lease is refused only because other jobs have the machines, or because machines have a fault. Both may be
    over soon."""


class ReplaceRequest(Model):
    """An incident evicts machines of its job and asks for replacements: for all of them, or for none.

    A repeated request with the same ``id`` gets the same replacement.
    """

    id: str
    """Id of the incident and number of the request."""
    job: str
    run: str
    evict: list[Eviction]
    keep: list[Machine] = Field(default_factory=list)
    """The job's other machines, whose failure domains matter for the choice."""
    back: dict[str, str] = Field(default_factory=dict)
    """Unfit replacement in ``evict`` → the machine that it was to replace, whose ranks still run. If there are too few
    machines, the replacement leaves nevertheless, and the machine that it was to replace stays in the job."""


class Replaced(Model):
    """The answer to a replacement."""

    machines: dict[str, Machine] = Field(default_factory=dict)
    """Evicted machine → its replacement, which may be a machine from ``ReplaceRequest.back``; empty: there are too few
    machines, and none was evicted."""
    why: str = ""
    """How many machines are needed and how many there are, if there are too few."""
    held: str = ""
    """Why an operator has to approve the evictions before machines are replaced; empty: no approval is needed."""


class PoolEviction(Model):
    """A machine that left a job without an operator."""

    machine: str
    job: str
    reason: str
    time_ns: int


class GiveBack(Model):
    """A job ended: its lease of machines is over."""

    job: str
    run: str


class RunningJob(Model):
    """A running job, as its workflow describes it."""

    job: str
    run: str
    machines: list[Machine]
    launched: bool = True
    """Whether ranks of the job may live there; False: the job is still starting."""
    settled: bool = False
    """The job's ranks run and it has no open incident, so it needs only the machines that it names."""
    version: str = ""
    """Id of the version that it runs; empty: it runs in place."""


class ReadyRequest(Model):
    """Bring a job's code to idle machines and try it there, since any of them may become a replacement."""

    job: str
    version: str
    """Id of the version that the job ran when it was polled."""
    machines: list[Machine]


class ReadyResult(Model):
    """The result of trying a version on idle machines."""

    machines: dict[str, str] = Field(default_factory=dict)
    """Machine → why the version failed there; empty: it did not fail. Machines that did not answer are left out."""


class ToClean(Model):
    """A machine on which an evicted job may have left ranks."""

    machine: Machine
    job: str
    run: str


class PoolReturn(Model):
    """A machine returned from quarantine by itself, because it passed its tests."""

    machine: str
    job: str
    """The job from which it was evicted."""
    time_ns: int


class PollDigests(Model):
    """Digests of the answers to the previous poll: what is still the same need not be sent again."""

    machines: str = ""
    """Digest of the list of the cluster's machines; empty: the list is not known."""
    jobs: dict[str, str] = Field(default_factory=dict)
    """Job → digest of its description."""


class PollQuestions(Model):
    """The questions of a poll by the pool."""

    idle: list[Machine] = Field(default_factory=list)
    """Machines that no job has leased, to be inspected."""
    clean: list[ToClean] = Field(default_factory=list)
    fresh: bool = False
    """The pool is new and asks all machines which jobs they have."""
    leased: list[str] = Field(default_factory=list)
    """Jobs that have machines, or had one that has to be cleaned; the poll checks whether they still run."""
    returned: list[PoolReturn] = Field(default_factory=list)
    """Machines that returned from quarantine; the poll writes that into the ledger."""
    before: PollDigests = PollDigests()


class PollAnswers(Model):
    """The answers to a poll."""

    machines: list[Machine] | None = None
    """All machines of the cluster, the standbys last; None: not known."""
    standbys: int = 0
    """Number of standbys that there should be."""
    at_most: int = 0
    """The most machines to which the cluster can grow on request; 0: it cannot."""
    jobs: list[RunningJob] = Field(default_factory=list)
    """Running jobs, as far as they answer."""
    over: list[str] = Field(default_factory=list)
    """Jobs that have machines and do not run any more."""
    unknown: list[str] = Field(default_factory=list)
    """Jobs for which it is not known whether they still run."""
    listed: bool = True
    """Whether all running jobs are known; False: there may be more."""
    faults: dict[str, str] = Field(default_factory=dict)
    """Idle machine that is not fit or does not answer → why."""
    cleaned: list[str] = Field(default_factory=list)
    """Machines on which no rank of the evicted job is left."""
    written: list[PoolReturn] = Field(default_factory=list)
    """The machines of ``PollQuestions.returned``, if the ledger has them now."""
    same_machines: bool = False
    """The list of the cluster is that of the previous poll, and ``machines`` is left out."""
    same_jobs: list[str] = Field(default_factory=list)
    """Jobs whose description is that of the previous poll; they are left out of ``jobs``."""
    problem: str = ""
    """Why a question has no answer; empty: all questions have an answer."""


class Shortage(Model):
    """A job asked for replacements, and there were too few machines."""

    machines: int
    """Number of machines that it needs."""
    asked_ns: int = 0
    """When the job last asked, nanoseconds of the wall clock."""


class PoolState(BaseModel):
    """Everything that a pool's workflow keeps across continue-as-new; the workflow changes it in place."""

    model_config = ConfigDict(extra="allow")

    machines: dict[str, PoolMachine] = Field(default_factory=dict)
    """Name → machine."""
    standbys: int = 0
    """Number of standbys that there should be."""
    listed: int = 0
    """Number of machines in the list of the cluster."""
    at_most: int = 0
    """The most machines to which the cluster can grow on request; 0: it cannot."""
    short: dict[str, Shortage] = Field(default_factory=dict)
    """Job that waits for replacements → how many it needs."""
    provisioned: str = ""
    """The result of the last request to the cluster for more machines; empty: there was no request, or there are enough
    machines now."""
    replaced: dict[str, Replaced] = Field(default_factory=dict)
    """The last requests: id → answer."""
    evicted: list[PoolEviction] = Field(default_factory=list)
    """The machines that left jobs without an operator within the last hour."""
    known: bool = False
    """Whether the running jobs and their machines are known; until then, no job gets a machine."""
    looks: int = 0
    """Number of polls before the jobs were known."""
    returned: list[PoolReturn] = Field(default_factory=list)
    """Machines that returned from quarantine and that the ledger does not have yet, at most ``RETURNS_KEPT``."""
    problem: str = ""
    """The questions of the newest poll that have no answer, for people; empty: all have an answer."""

    @property
    def spare(self) -> int:
        """Number of machines that can replace others now."""
        usable = {PoolPlace.STANDBY, PoolPlace.FREE}
        return sum(machine.place in usable and not machine.fault for machine in self.machines.values())


class OperatorMove(Model):
    """An operator keeps a machine away from jobs, or releases it."""

    machine: str = Field(min_length=1, max_length=100)
    operator: str = Field(min_length=1, max_length=100)
    reason: str = Field("", max_length=300)
