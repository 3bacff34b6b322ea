"""A fault as data: its options, and all properties that follow from them alone.

The injection of a fault and the checks for its kind are in ``drills/faults/fault.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from drills.spec import settings
from drills.spec.job_options import JobOptions
from drills.spec.loss import Loss
from drills.spec.settings import machine_names, placement_of
from everstep.errors import ConfigError
from everstep.model.finding import Health, Owner
from everstep.model.job import JobSpec
from everstep.model.job_state import incident_workflow_id
from everstep.model.topology import Topology
from everstep.model.version import JobVersion

Entry = dict[str, Any]
"""An entry of the plan for ranks or workers."""
LOSS = "{loss}"
"""Placeholder in a description for the second fault's victims."""
STRIKE = "strike"
"""Id of the second fault, after which copies are needed."""
THEN_AFTER = 10
"""Number of steps between the first and the second fault of a drill."""
LIGHT = ["--seq", "16", "--dim", "88"]
"""Arguments of the example for little work in a step, with a state of the usual size."""
DEFAULT_SIZES: dict[str, Any] = {"machines": 4, "ranks_per_machine": 2, "tp": 2, "pp": 2}
"""Default sizes of a drill's job."""
STAGES = ("stop", "decide", "reattempt", "confirm")
"""Stages of every incident."""
WITH_RESTORE = (*STAGES[:2], "restore", *STAGES[2:])
"""Stages of an incident after a loss of memory."""
WITH_EVICTION = (STAGES[0], "evict", "prepare", *WITH_RESTORE[1:])
"""Stages of an incident after a machine is lost for good."""

Meets = Literal["nothing", "opening", "beside", "away", "stage"]
"""How a fault meets others in a soak: not at all; it opens an incident that others strike in; it strikes beside others;
a rank or a machine is lost while something is away; or it strikes in a stage of the incident of another fault."""


@dataclass(frozen=True, slots=True)
class ExpectedFinding:
    """The finding that an inspection must report when a fault breaks a device."""

    reason: str
    """Reason code of the finding."""
    owner: Owner
    verdict: Health = Health.FAULTY
    sure: bool = False
    """It names the machine for sure: if there is a replacement, the machine leaves the job."""

    @property
    def opens_incident(self) -> bool:
        """Whether an incident reports it; a finding with verdict unknown is only in the ledger."""
        return self.verdict is Health.FAULTY


class FaultOptions(BaseModel):
    """One fault of the vocabulary with its options; a subclass has the options as fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    """The real action of the fault, in one line."""
    line: ClassVar[str] = ""
    """The announcement of the fault in short; ``{ranks}``, ``{machine}``, ``{loss}`` and options are filled in."""

    # Use in soaks.

    not_soaked: ClassVar[str] = ""
    """Why no soak draws it; empty: soaks draw it."""
    own_job: ClassVar[bool] = False
    """A soak runs it in a separate job: file systems and control groups must be small from the job's beginning,
    devices must be healthy again before the next job, and diagnostic tests need the settings of a drill."""
    meets: ClassVar[Meets] = "nothing"
    seldom: ClassVar[bool] = False
    """A soak draws it half as often: it meets other faults in the same way as a stopped rank."""
    least_machines: ClassVar[int] = 1
    """Machines that a soak's job needs for it: enough for a majority, or to show which of them work together."""
    alike: ClassVar[bool] = False
    """A soak's job for it has one rank on each machine with the same work, so that a fault is felt at once."""
    drawn: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Option → the values from which a soak draws."""

    # Needs of the job.

    needs_network: ClassVar[bool] = False
    """The machines need their own network."""
    needs_postgres: ClassVar[bool] = False
    sizes: ClassVar[dict[str, Any]] = DEFAULT_SIZES
    shared_disk: ClassVar[bool] = False
    """The job writes checkpoints to a folder that outlives machines."""
    least_step: ClassVar[int] = 0
    """Earliest step of the fault: everstep must know the job's normal pace before."""

    # The strike, and its effect on the job.

    by_ranks: ClassVar[bool] = False
    """Ranks perform it themselves; else the injector does it from outside."""
    alone: ClassVar[bool] = False
    """It has no second fault, so no copies are needed."""
    is_control: ClassVar[bool] = False
    """It strikes the control plane in a stage of the incident that another fault opens."""
    is_update: ClassVar[bool] = False
    """It requests other code for the job, by a signal."""
    is_slowed: ClassVar[bool] = False
    """Steps continue and take longer: the vote must name the slow machine, or that there is none."""
    hangs: ClassVar[bool] = False
    """A rank hangs and the other ranks wait for it: its machine leaves the job if there is a replacement."""
    may_hang: ClassVar[bool] = False
    """The job may rightly count as hanging."""
    takes_machines: ClassVar[bool] = False
    """Machines are killed, and their memory is lost."""
    reported_of_all: ClassVar[bool] = False
    """An incident must report it for all machines at once."""
    delays_backups: ClassVar[bool] = False
    """An agent that receives backups accepts none meanwhile, and steps must not slow down because of it."""
    holds_up_backups: ClassVar[bool] = False
    """A part that backups need is away."""
    unreachable: ClassVar[bool] = False
    """Its machine cannot be notified that its ranks have to end: they wait for peers that are gone."""
    found: ClassVar[ExpectedFinding | None] = None
    """The expected finding of inspections, if no option decides it."""
    steps_done_anew: ClassVar[bool] = False
    """Repeated steps have other losses, so only the last report of each step is compared."""

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw the options for a soak.

        Args:
            rng: The soak's source of chance.
            topology: The topology of its job.
            alone: Whether the fault meets no other fault.
        """
        return {option: rng.choice(values) for option, values in cls.drawn.items()}

    @property
    def opening(self) -> FaultOptions:
        """The fault that opens the incident: itself, unless it strikes within the incident of another fault."""
        return self

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse options that make no sense on any machine.

        Raises:
            ConfigError: they make no sense.
        """

    def why_not(self) -> str:
        """Why it cannot be injected on this computer; empty: it can."""
        return ""

    # The target.

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """The ranks that it strikes; by default the last rank."""
        return [spec.topology().world_size - 1]

    def machine_index(self, spec: JobSpec) -> int:
        """Position of the struck machine in the job."""
        return spec.topology().machine(self.struck_ranks(spec)[0])

    def named_machines(self, topology: Topology) -> set[int]:
        """Positions of the machines that its options name, directly or by their ranks."""
        return set()

    def struck_machine(self, spec: JobSpec) -> str:
        """Name of the struck machine."""
        return f"m{self.machine_index(spec)}"

    @property
    def strikes_all(self) -> bool:
        """Whether a device of every machine breaks."""
        return False

    # The strike.

    def describe(self, spec: JobSpec) -> str:
        """The announcement of the fault, in a few words."""
        options = {name: getattr(self, name) for name in type(self).model_fields}
        ranks = " and ".join(f"rank {rank}" for rank in self.struck_ranks(spec))
        return self.line.format(**options | {"ranks": ranks, "machine": self.struck_machine(spec), "loss": LOSS})

    def rank_entries(self, at_step: int, spec: JobSpec, plan: Path) -> list[Entry]:
        """The entries for ranks, in order; empty: the injector does it from outside."""
        return []

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """The entries for workers.

        Args:
            spec: The job.
            plan: The plan of the ranks.
            processes: Pids of the cluster's processes, by name.

        Raises:
            CannotInject: the part to be killed is not of this cluster.
        """
        return []

    @property
    def marks(self) -> tuple[str, ...]:
        """Ids of the injector's own actions, in order."""
        if self.by_ranks:
            return ()
        return (self.name,) if self.alone else (self.name, STRIKE)

    @property
    def follows(self) -> str:
        """The second fault that ``--then`` names."""
        return ""

    @property
    def struck_again(self) -> bool:
        """Whether the second fault strikes after the end of the first, when all copies are known exactly."""
        return False

    def loss(self, spec: JobSpec) -> Loss:
        """The machines and ranks that the second fault kills; empty: there is none."""
        return Loss()

    @property
    def repeats(self) -> int:
        """How often the fault strikes, again after each recovery."""
        return 1

    @property
    def strike_delay(self) -> int | None:
        """Number of steps after the fault at which the job waits for a strike, so that all copies are known; None: the
        strike hits a running job."""
        return None

    # The job.

    @property
    def step_s(self) -> float | None:
        """Length of the example's steps, seconds: agents are polled twice a second, and the job must not end
        before a poll."""
        return None if self.by_ranks else settings.STEP_S

    @property
    def steps_after(self) -> int:
        """Number of steps that the job needs after the fault."""
        return 30

    @property
    def steps_needed(self) -> int:
        """Number of steps that the job must have after the fault for a useful result."""
        return 0

    @property
    def patience(self) -> dict[str, Any]:
        """Fields of the recovery policy."""
        if self.stays_away:
            return settings.GONE_POLICY if self.strike_delay is None else settings.GONE_PATIENT
        return settings.DRILL_POLICY if self.strike_delay is None else settings.PATIENT_POLICY

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        """Fields of the checkpoint policy that the fault needs to show its effect; ``disk`` outlives machines."""
        return settings.disk_settings(disk) if self.shared_disk else {}

    def load(self, at_step: int) -> list[str]:
        """Arguments of the example for the work in a step."""
        return LIGHT

    def standbys(self, topology: Topology) -> int:
        """The smallest number of standbys that it needs."""
        return 0

    # The expected result.

    @property
    def absorbed(self) -> bool:
        """Whether the job should continue without an incident."""
        return False

    @property
    def only_reported(self) -> bool:
        """Whether the job should continue, and an incident only reports the fault."""
        return False

    @property
    def is_silent(self) -> bool:
        """Whether an agent reports nothing while its ranks step; the job must not wait, since then all is silent."""
        return False

    @property
    def stays_away(self) -> bool:
        """Whether the killed parts stay away."""
        return False

    @property
    def parks(self) -> bool:
        """Whether the job should be parked, since only a person can help."""
        return False

    parked_words: ClassVar[tuple[str, ...]] = ()
    """Words that the reason for parking must contain."""

    @property
    def parked_for_a_while(self) -> bool:
        """Whether a parked job resumes without an operator, since the missing part comes back or arrives late."""
        return self.needs_network

    @property
    def shows_not_finite(self) -> bool:
        """Whether it shows as a loss, or a gradient norm, that is not finite."""
        return False

    @property
    def finding(self) -> ExpectedFinding | None:
        """The expected finding of inspections; None: no finding."""
        return self.found

    @property
    def found_later(self) -> tuple[str, ...]:
        """Reason codes that inspections still report for some time after the drill."""
        return (self.finding.reason,) if self.finding else ()

    @property
    def is_replaced(self) -> bool:
        """Whether a spare machine takes the place of the struck one while its ranks step."""
        return self.finding is not None and self.finding.sure and not self.follows and not self.strikes_all

    def leaving(self, spec: JobSpec) -> list[str]:
        """Machines that are at fault or gone: they must leave the job if there are enough spare machines."""
        return []

    def may_leave(self, spec: JobSpec) -> set[str]:
        """Machines that may either leave the job or stay."""
        return set()

    @property
    def must_be_reported(self) -> bool:
        """Whether training continues with the fault, so that an agent must report it."""
        return False

    @property
    def standby_is_lost(self) -> bool:
        """Whether the chosen replacement must leave the job too."""
        return False

    @property
    def incidents_due(self) -> int:
        """The expected number of incidents."""
        return self.repeats

    @property
    def launches_due(self) -> int:
        """The expected number of launches of the job."""
        return 1 + self.incidents_due

    def swept(self, job: str) -> str:
        """The workflow whose history a sweep goes through: the first incident's."""
        return incident_workflow_id(job, 1)

    @property
    def incidents_in_soaks(self) -> int:
        """The most incidents that it may open in a soak."""
        return 0 if self.absorbed and not self.follows else 1

    @property
    def stages(self) -> Sequence[str]:
        """Stages of the incident that it opens."""
        return STAGES

    def reference(self, spec: JobSpec, versions: Sequence[JobVersion]) -> JobSpec:
        """The job whose run without a fault has the same losses."""
        return spec


class OnRanks(FaultOptions):
    """A fault that strikes ranks."""

    ranks: list[int] = Field(
        default_factory=list,
        description="Rank to strike; several at once. Default: the last.",
        json_schema_extra={"option": "--rank", "metavar": "R"},
    )

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """The ranks in the options, or the fault's default."""
        return list(dict.fromkeys(self.ranks)) or super().struck_ranks(spec)

    def named_machines(self, topology: Topology) -> set[int]:
        """Positions of the machines of the named ranks."""
        return super().named_machines(topology) | {topology.machine(rank) for rank in self.ranks}

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse ranks that the job does not have."""
        super().refuse(drill, spec)
        for rank in self.ranks:
            if not 0 <= rank < spec.topology().world_size:
                raise ConfigError(f"--rank {rank} does not exist: ranks go from 0 to {spec.topology().world_size - 1}")

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw a rank."""
        return super().draw(rng, topology, alone=alone) | {"ranks": [rng.randrange(topology.world_size)]}


class OnMachine(FaultOptions):
    """A fault that strikes a machine."""

    machine: str = Field("", description="Machine to strike, m2 or 2.", json_schema_extra={"metavar": "M"})

    @field_validator("machine")
    @classmethod
    def _by_name(cls, value: str) -> str:
        return f"m{value}" if value.isdecimal() else value

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """The first rank of the named machine."""
        if not self.machine:
            return super().struck_ranks(spec)
        return [spec.topology().ranks(machine_names(spec.machines).index(self.machine))[0]]

    def named_machines(self, topology: Topology) -> set[int]:
        """The position of the named machine."""
        index = {machine_names(topology.machines).index(self.machine)} if self.machine else set()
        return super().named_machines(topology) | index

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a machine that the job does not have."""
        super().refuse(drill, spec)
        names = machine_names(spec.machines)
        if self.machine and self.machine not in names:
            raise ConfigError(f"--machine {self.machine} does not exist: machines are {', '.join(names)}")

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw a machine."""
        return super().draw(rng, topology, alone=alone) | {"machine": rng.choice(machine_names(topology.machines))}


def owners(spec: JobSpec, machine: int) -> list[int]:
    """The ranks whose backup lies on a machine."""
    topology = spec.topology()
    peers = placement_of(spec).peers
    return [rank for rank, peer in enumerate(peers) if peer is not None and topology.machine(peer) == machine]


def with_peer(spec: JobSpec, rank: int) -> set[int]:
    """The machine of a rank, and the machine that has its backup."""
    topology, peer = spec.topology(), placement_of(spec).peers[rank]
    return {topology.machine(rank)} | ({topology.machine(peer)} if peer is not None else set())


def refuse_without_backups(fault: FaultOptions, spec: JobSpec) -> None:
    """Refuse a fault of backups in a job that has none.

    Raises:
        ConfigError: the job has none.
    """
    if placement_of(spec).peers[fault.struck_ranks(spec)[0]] is None:
        raise ConfigError(f"{fault.name}: the job has no backups: it needs two machines, and backup = true")


def refuse_without_disk(fault: FaultOptions, drill: JobOptions, spec: JobSpec) -> None:
    """Refuse a fault of checkpoints on disk in a job that has none, or fewer than two at the fault.

    Raises:
        ConfigError: the job has none.
    """
    policy = spec.checkpoint
    if not (policy.disk and policy.disk_every_steps):
        raise ConfigError(f"{fault.name}: the job writes no checkpoints to disk: set disk and disk_every_steps")
    if policy.disk_every_steps * 2 > drill.at_step:
        raise ConfigError(
            f"{fault.name}: at step {drill.at_step} the disk has no two checkpoints yet: "
            f"use --at-step {policy.disk_every_steps * 2} or later"
        )
