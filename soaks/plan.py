"""The plan of a soak: which faults strike the job at which step, alone, together, or within a recovery. Data."""

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
"""Step of the first gate: by then two checkpoints are on every disk."""
GAP = 20
"""Steps from a gate to the next one: room for a fault that strikes twice, and for checkpoints on disk."""
LEAD = 5
"""Steps from a gate to the fault."""
AFTER = 5
"""Steps after the last gate."""

How = Literal["alone", "together", "within"]
Setting = Literal["one job", "own jobs", "network"]
"""Where an episode runs: within the long job, in a job of its own (``OWN_JOBS``), or on machines that have a network of
their own, there too within a long job or in a job of its own."""


class Sizes(BaseModel):
    """Sizes of the job; by default there are several parallel groups of each kind."""

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
        """Which rank is where."""
        return Topology.of(self.machines, self.ranks_per_machine, tp=self.tp, pp=self.pp)


class Episode(BaseModel):
    """One fault, or two that meet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1, description="Its name: it stays when episodes around it are left out.")
    how: How = "alone"
    faults: list[AnyFault] = Field(min_length=1, max_length=2)
    other: str = Field(
        "", description="A machine of the second job, by its place there: lost for good at once with it."
    )
    stage: str = Field("", description="within: the second strikes in this stage of the incident that the first opens,")
    moment: str = Field("middle", description="… at this moment of it.")

    @model_validator(mode="after")
    def _counts(self) -> Episode:
        if self.other and not any(fault.stays_away for fault in self.faults):
            raise ValueError(f"episode {self.number}: a machine of the other job is lost only where one of this one is")
        if (len(self.faults) == 1) != (self.how == "alone"):
            raise ValueError(f"episode {self.number}: {self.how} does not go with {len(self.faults)} faults")
        return self

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of its faults."""
        return tuple(fault.name for fault in self.faults)

    @property
    def setting(self) -> Setting:
        """The setting in which it runs."""
        if any(fault.needs_network for fault in self.faults):
            return "network"
        return "own jobs" if self.own_job else "one job"

    @property
    def own_job(self) -> bool:
        """Whether it is a job of its own, and not a part of the long one."""
        return any(fault.own_job for fault in self.faults)

    @property
    def meeting(self) -> str:
        """Which kinds meet how, for counting: ``kill-rank within kill-machine``."""
        if self.how == "together":
            return " with ".join(sorted(self.kinds))
        return f"{self.kinds[1]} within {self.kinds[0]}" if self.how == "within" else self.kinds[0]


class SoakPlan(BaseModel):
    """Episodes in order, and the job that they strike."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    sizes: Sizes = Sizes()
    standbys: int = Field(2, ge=0, description="Machines in the pool beside those of both jobs.")
    other: int = Field(2, ge=0, description="Machines of a second job that runs beside; 0: there is none.")
    workers: int = Field(1, ge=1, description="Worker processes; with 1 each kill of one stops all control.")
    step_seconds: float = Field(0.2, ge=0, description="Shortest step: long enough for the backup of the one before.")
    episodes: list[Episode] = Field(min_length=1)

    @property
    def faults(self) -> int:
        """Number of faults."""
        return sum(len(episode.faults) for episode in self.episodes)

    @property
    def steps(self) -> int:
        """Length of the job."""
        return self.gate(len(self.episodes)) + AFTER

    def gate(self, index: int) -> int:
        """Step at which the job waits before the episode at that place; of the number of episodes: the last gate."""
        return FIRST_GATE + GAP * index

    def request(self, index: int, position: int) -> DrillRequest:
        """A fault of an episode with all that an injector needs: the job's sizes and the step."""
        episode = self.episodes[index]
        first, fault = episode.faults[0], episode.faults[position]
        if isinstance(first, UpdateFault):  # the losses of the whole run are held against one without updates
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
        """The episodes by setting, in the order in which they come: each part has a cluster of its own."""
        by_setting = {episode.setting: episode for episode in self.episodes}
        return [
            (setting, self.only({episode.number for episode in self.episodes if episode.setting == setting}))
            for setting in get_args(Setting)
            if setting in by_setting
        ]

    def only(self, numbers: Collection[int]) -> SoakPlan:
        """A plan with only some of the episodes."""
        return self.model_copy(update={"episodes": [episode for episode in self.episodes if episode.number in numbers]})

    def check(self) -> None:
        """Refuse what makes no sense in a plan that was written by hand.

        Raises:
            ConfigError: a fault, or an option of one, does not exist, or two episodes have one number.
        """
        numbers = [episode.number for episode in self.episodes]
        if again := {number for number in numbers if numbers.count(number) > 1}:
            raise ConfigError(f"the plan has episode {min(again)} twice")
        for index, episode in enumerate(self.episodes):
            if episode.how == "within" and not (episode.stage or isinstance(episode.faults[1], ControlFault)):
                raise ConfigError(f"episode {episode.number}: 'within' needs a stage")
            if episode.other and episode.other not in machine_names(self.other):
                raise ConfigError(f"episode {episode.number}: the other job has no machine {episode.other}")
            for position in range(len(episode.faults)):
                try:
                    check_sense(self.request(index, position))  # what this machine cannot do is left out, and listed
                except ConfigError as error:
                    raise ConfigError(f"episode {episode.number}: {error}") from error

    def write(self, path: Path) -> None:
        """Write it to a file, whole or not at all."""
        private.replace(path, (self.model_dump_json(exclude_unset=True, indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> SoakPlan:
        """Read it from a file.

        Raises:
            ConfigError: it is not there, or no plan.
        """
        try:
            return cls.model_validate_json(path.read_text())
        except OSError as error:
            raise ConfigError(f"the plan {path} cannot be read: {error.strerror}") from error
        except (ValidationError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not the plan of a soak: {error}") from error
