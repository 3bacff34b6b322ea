"""The plan of a soak, as data: the faults that strike the job, alone, together, or within a recovery."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from drills.checks import check_sense
from drills.faults.all import AnyFault
from drills.faults.control_plane import ControlFault
from drills.faults.updates import UpdateFault
from drills.spec.request import DrillRequest
from drills.spec.settings import machine_names
from everstep.errors import ConfigError, TopologyError
from everstep.model.topology import Topology
from everstep.system import private_files as private

FIRST_GATE = 10
"""Step of the first gate: two checkpoints are on every disk by then."""
GAP = 20
"""Number of steps between two gates: enough for a fault that strikes twice, and for checkpoints on disk."""
LEAD = 5
"""Number of steps from a gate to the fault."""
AFTER = 5
"""Number of steps after the last gate."""

How = Literal["alone", "together", "within"]
"""How the faults of an episode meet: one fault, two at once, or one within the recovery from the other."""
Setting = Literal["one job", "own jobs", "network"]
"""Where an episode runs: in the long job, in a job of its own, or on machines with a network of their own."""


class Sizes(BaseModel):
    """Sizes of the job; by default it has several parallel groups of each kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machines: int = 4
    ranks_per_machine: int = 2
    tp: int = 2
    pp: int = 2

    @model_validator(mode="after")
    def _fit(self) -> Sizes:
        try:
            self.topology()
        except TopologyError as error:
            raise ValueError(str(error)) from error
        return self

    def topology(self) -> Topology:
        """Return the topology of a job of these sizes."""
        return Topology.of(self.machines, self.ranks_per_machine, tp=self.tp, pp=self.pp)


class Episode(BaseModel):
    """An episode: one fault, or two that meet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1, description="Number of the episode; it does not change when other episodes are left out.")
    how: How = "alone"
    faults: list[AnyFault] = Field(min_length=1, max_length=2)
    other: str = Field(
        "", description="A machine of the second job that is lost for good at the same time: m0 is its first."
    )
    stage: str = Field(
        "", description="For within: stage of the first fault's incident in which the second fault strikes."
    )
    moment: str = Field("middle", description="For within: moment of this stage (begin, middle or end).")

    @model_validator(mode="after")
    def _fits(self) -> Episode:
        if self.other and not any(fault.stays_away for fault in self.faults):
            raise ValueError(f"episode {self.number}: other needs a fault with which a machine stays away")
        if (len(self.faults) == 1) != (self.how == "alone"):
            raise ValueError(f"episode {self.number}: {self.how} does not fit {len(self.faults)} faults")
        return self

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of its faults."""
        return tuple(fault.name for fault in self.faults)

    @property
    def setting(self) -> Setting:
        """Where it runs."""
        if any(fault.needs_network for fault in self.faults):
            return "network"
        return "own jobs" if self.own_job else "one job"

    @property
    def own_job(self) -> bool:
        """Whether it runs in a job of its own, and not in the long job."""
        return any(fault.own_job for fault in self.faults)

    @property
    def meeting(self) -> str:
        """The meeting in words, for counts: ``kill-rank within kill-machine``."""
        if self.how == "together":
            return " with ".join(sorted(self.kinds))
        return f"{self.kinds[1]} within {self.kinds[0]}" if self.how == "within" else self.kinds[0]


class SoakPlan(BaseModel):
    """The episodes of a soak in order, and the sizes of the job that they strike."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    sizes: Sizes = Sizes()
    standbys: int = Field(2, ge=0, description="Machines in addition to those of both jobs.")
    other: int = Field(2, ge=0, description="Machines of a second job; 0: there is none.")
    workers: int = Field(
        1,
        ge=1,
        description="Number of worker processes; with 1, each kill stops the whole control plane except Temporal.",
    )
    step_seconds: float = Field(0.2, ge=0, description="Shortest step, long enough for the backup of the previous one.")
    episodes: list[Episode] = Field(min_length=1)

    @property
    def faults(self) -> int:
        """The number of faults."""
        return sum(len(episode.faults) for episode in self.episodes)

    @property
    def steps(self) -> int:
        """The number of steps of the job."""
        return self.gate(len(self.episodes)) + AFTER

    def gate(self, index: int) -> int:
        """Return the step of the gate before the episode with this index; after the last episode there is one more
        gate."""
        return FIRST_GATE + GAP * index

    def request(self, index: int, position: int) -> DrillRequest:
        """Return the request of a drill for one fault: the fault at ``position`` in the episode with this index."""
        episode = self.episodes[index]
        first, fault = episode.faults[0], episode.faults[position]
        if isinstance(first, UpdateFault):  # losses are compared with a run without updates
            first = first.model_copy(update={"neutral": True})
        if position == 0:
            fault = first
        elif isinstance(fault, ControlFault):
            fault = fault.model_copy(update={"opened_by": first})
        return DrillRequest(
            fault=fault,
            at_step=self.gate(index) + LEAD,
            steps=self.steps,
            step_seconds=self.step_seconds,
            **self.sizes.model_dump(),
        )

    def parts(self) -> list[tuple[Setting, SoakPlan]]:
        """Return the plan split by setting; each part has a cluster of its own."""
        by_setting = {episode.setting: episode for episode in self.episodes}
        return [
            (setting, self.only({episode.number for episode in self.episodes if episode.setting == setting}))
            for setting in get_args(Setting)
            if setting in by_setting
        ]

    def only(self, numbers: Collection[int]) -> SoakPlan:
        """Return the plan with only the episodes of these numbers."""
        return self.model_copy(update={"episodes": [episode for episode in self.episodes if episode.number in numbers]})

    def check(self) -> None:
        """Refuse a plan, written by hand, that makes no sense.

        Raises:
            ConfigError: an episode makes no sense, or two episodes have the same number.
        """
        numbers = [episode.number for episode in self.episodes]
        if again := {number for number in numbers if numbers.count(number) > 1}:
            raise ConfigError(f"the plan has episode {min(again)} twice")
        for index, episode in enumerate(self.episodes):
            if episode.how == "within" and not (episode.stage or isinstance(episode.faults[1], ControlFault)):
                raise ConfigError(f"episode {episode.number}: within needs a stage")
            if episode.other and episode.other not in machine_names(self.other):
                raise ConfigError(f"episode {episode.number}: the other job has no machine {episode.other}")
            for position in range(len(episode.faults)):
                try:
                    check_sense(self.request(index, position))  # faults that cannot be injected here are left out later
                except ConfigError as error:
                    raise ConfigError(f"episode {episode.number}: {error}") from error

    def write(self, path: Path) -> None:
        """Write the plan to a file, atomically."""
        private.replace(path, (self.model_dump_json(exclude_unset=True, indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> SoakPlan:
        """Read a plan from a file.

        Raises:
            ConfigError: the file cannot be read, or is no plan.
        """
        try:
            return cls.model_validate_json(path.read_text())
        except OSError as error:
            raise ConfigError(f"the plan {path} cannot be read: {error.strerror}") from error
        except (ValidationError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not the plan of a soak: {error}") from error
