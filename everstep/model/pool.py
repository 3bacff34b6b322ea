"""The machines of a cluster and whose they are, as their pool keeps it: leases, standbys, quarantine.

One workflow for each cluster, ``pool/<task queue>``, owns this (``workflows.pool``).
These models are stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from everstep.model.eviction import Eviction
from everstep.model.machine import Machine
from everstep.model.message import Model, Words

POOL_WORKFLOW = "StandbyPool"
"""Type of the workflow that owns the machines of a cluster."""


def pool_workflow_id(task_queue: str) -> str:
    """Id of the workflow that owns the machines of a cluster."""
    return f"pool/{task_queue}"


class PoolPlace(Words):
    """What a machine is there for at present."""

    ACTIVE = "active"
    """A job has it."""
    STANDBY = "standby"
    """It is checked and kept for replacement."""
    FREE = "free"
    """No job has it, and it is no standby: jobs that start take such machines."""
    PROVISIONING = "provisioning"
    """It has come into the list of the cluster and was not found fit yet: nobody is replaced by it before."""
    CORDONED = "cordoned"
    """An operator keeps it away from jobs."""
    QUARANTINED = "quarantined"
    """It was evicted; it is tested, and comes back only by passing, or by an operator."""


class PoolMachine(Model):
    """One machine of the cluster."""

    machine: Machine
    place: PoolPlace
    job: str = ""
    """Which has it, or from which it was evicted; empty: none."""
    run: str = ""
    """Id of that job's run."""
    since_ns: int = 0
    by: str = ""
    """Who put it there: a job, an incident, an operator, or the pool."""
    why: str = ""
    evicted_ns: list[int] = Field(default_factory=list)
    """When it was evicted, the last 10 times."""
    uncleaned: bool = False
    """Ranks of the job it was evicted from may live there: they were not ended yet."""
    wanted_out: bool = False
    """It is cordoned once its job leaves it: an operator said so."""
    fault: str = ""
    """Why it cannot be used, as the newest look has it; empty: nothing speaks against it."""
    passed: int = 0
    """So many looks in a row found nothing against it, in quarantine."""
    until_released: bool = False
    """It stays in quarantine until an operator releases it: a test of the stopped machine found the fault, and no
    inspection can."""
    unlisted_ns: int = 0
    """Since when it is not in the list of the cluster any more; 0: it is, or that is not known."""
    absent: int = 0
    """So many looks in a row found that its job does not have it."""
    ready: dict[str, str] = Field(default_factory=dict)
    """Versions of jobs' code that were brought to it and tried there, by their ids, the last ones → what was found
    against them there; empty: nothing."""


class LeaseRequest(Model):
    """A job that starts wants machines, by name. Asked twice by the same run, it is the same lease."""

    job: str
    run: str
    machines: list[Machine]


class Leased(Model):
    """What a job gets: all that it named, or none."""

    refused: dict[str, str] = Field(default_factory=dict)
    """Machine → why the job cannot have it; empty: it has them all."""
    may_change: bool = False
    """It is refused because other jobs have machines, and for no other reason: they may be over soon."""


class ReplaceRequest(Model):
    """An incident evicts machines of its job and wants others in their places: for all of them, or for none.

    Asked twice with the same ``id`` it is the same replacement.
    """

    id: str
    """Of the incident, with what tells its requests apart."""
    job: str
    run: str
    evict: list[Eviction]
    keep: list[Machine] = Field(default_factory=list)
    """The job's other machines, whose failure domains matter for the choice."""
    back: dict[str, str] = Field(default_factory=dict)
    """Machine of ``evict`` that came for another one and is not fit → that other one, whose ranks still go on. Where
    there are too few others the first leaves all the same, and the second stays in the job."""


class Replaced(Model):
    """The answer to a replacement."""

    machines: dict[str, Machine] = Field(default_factory=dict)
    """Evicted machine → the one in its place, which may be the one that it came for (``ReplaceRequest.back``); empty:
    there are too few, and nothing was evicted."""
    why: str = ""
    """Where there are too few: how many are needed, and how many there are."""


class GiveBack(Model):
    """A job ended: its lease of machines is over."""

    job: str
    run: str


class RunningJob(Model):
    """A job that runs, as its workflow says."""

    job: str
    run: str
    machines: list[Machine]
    launched: bool = True
    """Ranks of it may live there; False: it is still starting."""
    settled: bool = False
    """Its ranks run and it is in no incident: it has no use for a machine that it does not name."""
    version: str = ""
    """Id of the version of its code that runs; empty: it runs in place."""


class ReadyRequest(Model):
    """Bring the code that a job runs to idle machines, and try it there: any of them may take the place of another."""

    job: str
    version: str
    """Id of the version that it ran when it was looked at."""
    machines: list[Machine]


class Readied(Model):
    """What came of it."""

    machines: dict[str, str] = Field(default_factory=dict)
    """Machine → what was found against the version there; empty: nothing. Those that did not answer are left out."""


class ToClean(Model):
    """A machine on which an evicted job may have left ranks."""

    machine: Machine
    job: str
    run: str


class LookRequest(Model):
    """What the pool wants to know."""

    idle: list[Machine] = Field(default_factory=list)
    """Machines that no job has: are they fit?"""
    clean: list[ToClean] = Field(default_factory=list)
    fresh: bool = False
    """Nothing is known yet: all machines are asked which jobs they have."""
    leased: list[str] = Field(default_factory=list)
    """Jobs that have machines, or had one that is to be cleaned: do they run?"""


class Looked(Model):
    """What there is."""

    machines: list[Machine] | None = None
    """All of the cluster, the standbys last; None: it is not known."""
    standbys: int = 0
    """How many of them there should be."""
    at_most: int = 0
    """The cluster can be asked for machines until it has so many; 0: it does not grow by itself."""
    jobs: list[RunningJob] = Field(default_factory=list)
    """That run, as far as they answer."""
    over: list[str] = Field(default_factory=list)
    """Jobs that have machines, and do not run any more."""
    unknown: list[str] = Field(default_factory=list)
    """Jobs of which this is not known."""
    listed: bool = True
    """It is known which jobs run; False: there may be others."""
    faults: dict[str, str] = Field(default_factory=dict)
    """Idle machine that is not fit, or does not answer → why."""
    cleaned: list[str] = Field(default_factory=list)
    """Machines on which nothing of the evicted job is left."""
    problem: str = ""
    """Why something is not known."""


class Shortage(Model):
    """A job asked for machines in the places of others, and there were too few."""

    machines: int
    """It needs."""
    asked_ns: int = 0
    """When it asked last."""


class PoolState(BaseModel):
    """Everything that a pool's workflow carries across continue-as-new; it changes it in place."""

    model_config = ConfigDict(extra="allow")

    machines: dict[str, PoolMachine] = Field(default_factory=dict)
    """By name."""
    standbys: int = 0
    """How many there should be."""
    listed: int = 0
    """Machines that the list of the cluster has."""
    at_most: int = 0
    """The cluster can be asked for machines until it has so many; 0: it does not grow by itself."""
    short: dict[str, Shortage] = Field(default_factory=dict)
    """Job that waits for machines in the places of others → how many it needs."""
    provisioned: str = ""
    """What came of asking the cluster for more machines last; empty: it was not asked, or there are enough now."""
    replaced: dict[str, Replaced] = Field(default_factory=dict)
    """Answers to requests, by their ids; the last ones."""
    known: bool = False
    """The jobs that run were found at least once, with their machines: before that, nobody gets any."""
    looks: int = 0
    """So many were done while that was not so."""
    problem: str = ""
    """What the newest look could not find out."""

    @property
    def spare(self) -> int:
        """Machines that could take the place of others now."""
        places = {PoolPlace.STANDBY, PoolPlace.FREE}
        return sum(one.place in places and not one.fault for one in self.machines.values())


class OperatorMove(Model):
    """A person takes a machine away from jobs, or lets it come back."""

    machine: str = Field(min_length=1, max_length=100)
    operator: str = Field(min_length=1, max_length=100)
    reason: str = Field("", max_length=300)
