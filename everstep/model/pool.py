"""The machines of a cluster and whose they are, as their pool keeps it: leases, standbys, quarantine.

One workflow for each cluster, ``pool/<task queue>``, owns this (``workflows.pool``).
These models are stored in histories: fields are only added, with defaults.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from everstep.model.eviction import Eviction
from everstep.model.machine import Machine
from everstep.model.message import Model
from everstep.model.words import Words


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
    """It was asked for, and does not answer yet."""
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
    """Ranks of the job it was evicted from may live there: it did not answer yet."""
    fault: str = ""
    """Why it cannot be used, as the newest look has it; empty: nothing speaks against it."""


class LeaseRequest(Model):
    """A job that starts wants machines, by name. Asked twice by the same run, it is the same lease."""

    job: str
    run: str
    machines: list[Machine]


class Leased(Model):
    """What a job gets: all that it named, or none."""

    refused: dict[str, str] = Field(default_factory=dict)
    """Machine → why the job cannot have it; empty: it has them all."""


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


class Replaced(Model):
    """The answer to a replacement."""

    machines: dict[str, Machine] = Field(default_factory=dict)
    """Evicted machine → the one in its place; empty: there are too few, and nothing was evicted."""
    standbys: int = 0
    """Left after it; where there are too few, so many there are."""
    why: str = ""
    """Where there are too few: how many are missing, and what happens next; else: where they come from."""
    twice: list[str] = Field(default_factory=list)
    """Evicted machines that were evicted before within the window of the pool."""


class GiveBack(Model):
    """A job ended, or left machines: its lease of them is over. Without names: all of them."""

    job: str
    run: str
    machines: list[str] = Field(default_factory=list)


class PoolState(BaseModel):
    """Everything that a pool's workflow carries across continue-as-new; it changes it in place."""

    model_config = ConfigDict(extra="allow")

    machines: dict[str, PoolMachine] = Field(default_factory=dict)
    """By name."""
    standbys: int = 0
    """How many there should be."""
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

    machine: str
    operator: str
    reason: str = ""
