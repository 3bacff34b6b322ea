"""A fault as data: its options, and the properties that follow from them.

A subclass in ``drills/faults`` adds how the fault is injected and checked (``drills/faults/fault.py``).
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
"""An entry of the plan for ranks or for workers (``everstep/rank/drill_faults.py``)."""
LOSS = "{loss}"
"""Placeholder in a description for the machines or ranks that are lost."""
STRIKE = "strike"
"""Id of the second fault, the strike: it kills ranks or machines, so that copies are needed."""
THEN_AFTER = 10
"""Number of steps between the first fault of a drill and the strike."""
LIGHT = ["--seq", "16", "--dim", "88"]
"""Arguments of the example that give a step little work, and the state its usual size."""
DEFAULT_SIZES: dict[str, Any] = {"machines": 4, "ranks_per_machine": 2, "tp": 2, "pp": 2}
"""Default sizes of a drill's job."""
STAGES = ("stop", "decide", "reattempt", "confirm")
"""Stages of every incident."""
WITH_RESTORE = (*STAGES[:2], "restore", *STAGES[2:])
"""Stages of an incident after a loss of memory."""
WITH_EVICTION = (STAGES[0], "evict", "prepare", *WITH_RESTORE[1:])
"""Stages of an incident after a machine is lost for good."""

Meets = Literal["nothing", "opening", "beside", "away", "stage"]
"""How a fault meets others in a soak. ``nothing``: not at all; ``opening``: it opens an incident in which another fault
strikes; ``beside``: it strikes at the same time as another; ``away``: it takes a part away, and a rank or a machine is
lost meanwhile; ``stage``: it strikes in a stage of the incident that another fault opens."""


@dataclass(frozen=True, slots=True)
class ExpectedFinding:
    """The finding that an inspection must report after a fault broke a device."""

    reason: str
    """Reason code of the finding."""
    owner: Owner
    verdict: Health = Health.FAULTY
    sure: bool = False
    """Whether the finding names the machine for sure: then the machine leaves the job if there is a replacement."""

    @property
    def opens_incident(self) -> bool:
        """Whether an incident reports the finding; a finding with the verdict unknown is only in the ledger."""
        return self.verdict is Health.FAULTY


class FaultOptions(BaseModel):
    """A fault with its options, which are the fields of a subclass."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    """What the fault does, in one line for users."""
    line: ClassVar[str] = ""
    """The announcement of the fault; ``{ranks}``, ``{machine}``, ``{loss}`` and options in braces are filled in."""

    # Use in soaks.

    not_soaked: ClassVar[str] = ""
    """Why no soak draws the fault; empty: soaks draw it."""
    own_job: ClassVar[bool] = False
    """Whether a soak runs the fault in a separate job. There are three reasons: the job needs small file systems or
    control groups from its beginning; a device must be healthy again before the next fault; or the job needs a drill's
    settings of tests."""
    meets: ClassVar[Meets] = "nothing"
    seldom: ClassVar[bool] = False
    """Whether a soak draws it only half as often, since it meets other faults in the same way as a stopped rank."""
    least_machines: ClassVar[int] = 1
    """Number of machines that a soak's job needs for the fault, so that the machine at fault can be distinguished."""
    alike: ClassVar[bool] = False
    """Whether a soak's job for it has one rank on each machine, all with the same work, so that each step needs all
    links between machines."""
    drawn: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Option → the values that a soak draws from."""

    # What the job needs.

    needs_network: ClassVar[bool] = False
    """Whether each machine needs a network of its own."""
    needs_postgres: ClassVar[bool] = False
    """Whether the ledger needs a PostgreSQL server."""
    sizes: ClassVar[dict[str, Any]] = DEFAULT_SIZES
    """Default sizes of the job."""
    shared_disk: ClassVar[bool] = False
    """Whether the job writes checkpoints to a shared folder that outlives its machines."""
    least_step: ClassVar[int] = 0
    """Earliest step at which the fault may strike."""

    # Kind of the fault, and its effect on the job.

    by_ranks: ClassVar[bool] = False
    """Whether ranks perform the fault themselves; otherwise the injector performs it from outside."""
    alone: ClassVar[bool] = False
    """Whether there is no strike after the fault, so that no copies are needed."""
    is_control: ClassVar[bool] = False
    """Whether the fault strikes the control plane in a stage of the incident that another fault opens."""
    is_update: ClassVar[bool] = False
    """Whether the fault is an update of the job's code."""
    is_slowed: ClassVar[bool] = False
    """Whether the job's steps take longer: a vote then has to name the slow machine, or conclude that none is slow."""
    hangs: ClassVar[bool] = False
    """Whether a rank hangs; its machine then leaves the job if there is a replacement."""
    may_hang: ClassVar[bool] = False
    """Whether the job may rightly count as hanging."""
    takes_machines: ClassVar[bool] = False
    """Whether machines are killed and lose their memory."""
    reported_of_all: ClassVar[bool] = False
    """Whether one incident must report the fault for all machines."""
    delays_backups: ClassVar[bool] = False
    """Whether an agent accepts no backups for some time, which must not slow steps down."""
    holds_up_backups: ClassVar[bool] = False
    """Whether a part that backups need is away."""
    unreachable: ClassVar[bool] = False
    """Whether nothing can end the ranks of the struck machine; they then wait for peers that are gone."""
    fixed_finding: ClassVar[ExpectedFinding | None] = None
    """The expected finding, if it does not depend on options."""
    steps_done_anew: ClassVar[bool] = False
    """Whether repeated steps may have other losses, so that only the last report of each step is compared."""

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw the options for a soak.

        Args:
            rng: The soak's random numbers.
            topology: The topology of its job.
            alone: Whether the fault meets no other fault.
        """
        return {option: rng.choice(values) for option, values in cls.drawn.items()}

    @property
    def opening(self) -> FaultOptions:
        """The fault that opens the incident: this fault, unless it strikes within the incident of another one."""
        return self

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse options that make no sense on any computer.

        Raises:
            ConfigError: the options make no sense.
        """

    def why_not(self) -> str:
        """Return why the fault cannot be injected on this computer; empty: it can."""
        return ""

    # The target.

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """Return the ranks that the fault strikes; by default the last rank."""
        return [spec.topology().world_size - 1]

    def machine_index(self, spec: JobSpec) -> int:
        """Return the position of the struck machine in the job."""
        return spec.topology().machine(self.struck_ranks(spec)[0])

    def named_machines(self, topology: Topology) -> set[int]:
        """Return the positions of the machines that the options name, directly or by their ranks."""
        return set()

    def struck_machine(self, spec: JobSpec) -> str:
        """Return the name of the struck machine."""
        return f"m{self.machine_index(spec)}"

    @property
    def strikes_all(self) -> bool:
        """Whether a device breaks on every machine."""
        return False

    # The strike.

    def describe(self, spec: JobSpec) -> str:
        """Return the announcement of the fault, in a few words."""
        options = {name: getattr(self, name) for name in type(self).model_fields}
        ranks = " and ".join(f"rank {rank}" for rank in self.struck_ranks(spec))
        return self.line.format(**options | {"ranks": ranks, "machine": self.struck_machine(spec), "loss": LOSS})

    def rank_entries(self, at_step: int, spec: JobSpec, plan: Path) -> list[Entry]:
        """Return the entries for ranks, in order; empty: the injector does everything from outside."""
        return []

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """Return the entries for workers.

        Args:
            spec: The job.
            plan: The plan of the ranks.
            processes: Pids of the cluster's processes, by name.

        Raises:
            CannotInject: the process to be killed does not belong to the cluster.
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
        """The second fault that ``--then`` names; empty: none."""
        return ""

    @property
    def struck_again(self) -> bool:
        """Whether the strike follows after the end of the first fault, when all copies are known exactly."""
        return False

    def loss(self, spec: JobSpec) -> Loss:
        """Return the machines or ranks that the strike kills; empty: there is no strike."""
        return Loss()

    @property
    def repeats(self) -> int:
        """How many times the fault strikes: once more after each recovery."""
        return 1

    @property
    def strike_delay(self) -> int | None:
        """Number of steps after the fault at which the job waits for the strike, so that all copies are known; None: it
        does not wait."""
        return None

    # The job.

    @property
    def step_s(self) -> float | None:
        """Length of the example's steps, seconds; None: as fast as possible.

        The injector polls agents twice a second, so the job must not end before a poll.
        """
        return None if self.by_ranks else settings.STEP_S

    @property
    def steps_after(self) -> int:
        """Number of steps that the job needs after the fault."""
        return 30

    @property
    def steps_needed(self) -> int:
        """The least number of steps after the fault; with fewer, the result would prove nothing."""
        return 0

    @property
    def patience(self) -> dict[str, Any]:
        """Fields of the recovery policy that suit the fault."""
        if self.stays_away:
            return settings.QUICK if self.strike_delay is None else settings.PATIENT
        return settings.DRILL_POLICY if self.strike_delay is None else settings.PATIENT_POLICY

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        """Return the fields of the checkpoint policy that the fault needs; ``disk`` is a folder that outlives
        machines."""
        return settings.disk_settings(disk) if self.shared_disk else {}

    def load(self, at_step: int) -> list[str]:
        """Return the arguments of the example that decide the work in a step."""
        return LIGHT

    def standbys(self, topology: Topology) -> int:
        """Return the least number of standbys that the fault needs."""
        return 0

    # The expected result.

    @property
    def absorbed(self) -> bool:
        """Whether the job should continue without an incident."""
        return False

    @property
    def only_reported(self) -> bool:
        """Whether the job should continue while an incident only reports the fault."""
        return False

    @property
    def is_silent(self) -> bool:
        """Whether an agent reports nothing while its ranks step; in this case the job must not wait for the drill."""
        return False

    @property
    def stays_away(self) -> bool:
        """Whether the killed parts do not come back."""
        return False

    @property
    def parks(self) -> bool:
        """Whether the job should be parked, since only an operator can help."""
        return False

    parked_words: ClassVar[tuple[str, ...]] = ()
    """Words that the reason for parking must contain."""

    @property
    def parked_for_a_while(self) -> bool:
        """Whether the job may be parked and resume without an operator, since the missing part arrives later."""
        return self.needs_network

    @property
    def shows_not_finite(self) -> bool:
        """Whether the fault shows as a loss, or a gradient norm, that is not finite."""
        return False

    @property
    def finding(self) -> ExpectedFinding | None:
        """The expected finding of inspections; None: no device breaks."""
        return self.fixed_finding

    @property
    def lingering_reasons(self) -> tuple[str, ...]:
        """Reason codes of findings that stay active for some time after the drill."""
        return (self.finding.reason,) if self.finding else ()

    @property
    def is_replaced(self) -> bool:
        """Whether a spare machine takes the place of the struck machine while the ranks there step."""
        return self.finding is not None and self.finding.sure and not self.follows and not self.strikes_all

    def leaving(self, spec: JobSpec) -> list[str]:
        """Return the machines at fault, which must leave the job if there are enough spare machines."""
        return []

    def may_leave(self, spec: JobSpec) -> set[str]:
        """Return the machines that may leave the job, but need not."""
        return set()

    @property
    def must_be_reported(self) -> bool:
        """Whether training continues with the fault, and an agent must report a problem."""
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
        """Return the id of the workflow at whose events a sweep kills the worker; by default the job's first
        incident."""
        return incident_workflow_id(job, 1)

    @property
    def incidents_in_soaks(self) -> int:
        """The largest number of incidents that the fault may open in a soak."""
        return 0 if self.absorbed and not self.follows else 1

    @property
    def stages(self) -> Sequence[str]:
        """Stages of the incident that the fault opens."""
        return STAGES

    def reference(self, spec: JobSpec, versions: Sequence[JobVersion]) -> JobSpec:
        """Return the job without a fault whose losses this job must have."""
        return spec


class OnRanks(FaultOptions):
    """A fault that strikes ranks."""

    ranks: list[int] = Field(
        default_factory=list,
        description="Rank to strike; can be given several times. Default: the last rank.",
        json_schema_extra={"option": "--rank", "metavar": "R"},
    )

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """Return the ranks that the options name, or the default."""
        return list(dict.fromkeys(self.ranks)) or super().struck_ranks(spec)

    def named_machines(self, topology: Topology) -> set[int]:
        """Return the positions of the machines of the named ranks."""
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

    machine: str = Field("", description="Machine to strike, such as m2 or 2.", json_schema_extra={"metavar": "M"})

    @field_validator("machine")
    @classmethod
    def _by_name(cls, value: str) -> str:
        return f"m{value}" if value.isdecimal() else value

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """Return the first rank of the machine that the options name, or the default."""
        if not self.machine:
            return super().struck_ranks(spec)
        return [spec.topology().ranks(machine_names(spec.machines).index(self.machine))[0]]

    def named_machines(self, topology: Topology) -> set[int]:
        """Return the position of the named machine."""
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
    """Return the ranks whose backups lie on the machine at this position."""
    topology = spec.topology()
    peers = placement_of(spec).peers
    return [rank for rank, peer in enumerate(peers) if peer is not None and topology.machine(peer) == machine]


def with_peer(spec: JobSpec, rank: int) -> set[int]:
    """Return the positions of the machine of a rank, and of the machine that has its backup."""
    topology, peer = spec.topology(), placement_of(spec).peers[rank]
    return {topology.machine(rank)} | ({topology.machine(peer)} if peer is not None else set())


def refuse_without_backups(fault: FaultOptions, spec: JobSpec) -> None:
    """Refuse a fault of backups if the struck rank has no backup.

    Raises:
        ConfigError: the rank has none.
    """
    if placement_of(spec).peers[fault.struck_ranks(spec)[0]] is None:
        raise ConfigError(f"{fault.name}: the job has no backups: it needs two machines and backup = true")


def refuse_without_disk(fault: FaultOptions, drill: JobOptions, spec: JobSpec) -> None:
    """Refuse a fault of checkpoints on disk if the job has fewer than two of them when the fault strikes.

    Raises:
        ConfigError: the job has fewer.
    """
    policy = spec.checkpoint
    if not (policy.disk and policy.disk_every_steps):
        raise ConfigError(f"{fault.name}: the job writes no checkpoints to disk: set disk and disk_every_steps")
    if policy.disk_every_steps * 2 > drill.at_step:
        raise ConfigError(
            f"{fault.name}: at step {drill.at_step} there are not yet two checkpoints on disk: "
            f"use --at-step {policy.disk_every_steps * 2} or later"
        )
