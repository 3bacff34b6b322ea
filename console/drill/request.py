"""What a drill is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from console.drill.catalogue import CONTROL_FAULTS, MACHINE_FAULTS, RANK_FAULTS, kind_of
from console.drill.worker_faults import MOMENTS, STAGES
from console.job_file import load_job
from everstep.errors import ConfigError
from everstep.faults import exception_named
from everstep.job import JobSpec

SIGNALS = ("KILL", "SEGV", "ABRT")
DEFAULTS: dict[str, Any] = {"machines": 4, "ranks_per_machine": 2, "tp": 2, "pp": 2}
"""Sizes of the job of a drill."""
DRILL_POLICY = {"stall_floor_s": 3.0, "exit_grace_s": 3.0}
"""Hangs are found after 10 min, and early leavers after 60 s, by default; a drill's steps take 0.1 s (ours)."""


class DrillRequest(BaseModel):
    """One drill: the fault, its options and the job.

    ``None`` means: what suits the fault.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fault: str
    ranks: list[int] = Field(default_factory=list, description="Ranks that the fault strikes; default: the last.")
    signal: str = "KILL"
    code: int = Field(1, ge=0, le=255)
    exception: str = "RuntimeError"
    machine: str = ""
    """``m2`` or ``2``; default: the machine of the struck rank, or the last one."""
    at_step: int = Field(20, ge=0)
    times: int = Field(1, ge=1, le=20, description="The fault comes again at that step, after each recovery.")
    in_stage: str = ""
    at_event: int | None = Field(None, ge=1, description="Instead of a stage: an event of the incident's history.")
    during: str = ""
    moment: str = "middle"
    machines: int | None = None
    ranks_per_machine: int | None = None
    tp: int | None = None
    pp: int | None = None
    standbys: int = Field(1, ge=0)
    steps: int | None = Field(None, ge=1)
    config: Path | None = None
    script: list[str] = Field(default_factory=list, description="Script and arguments; default: the example GPT.")
    """``{run}`` in an argument stands for a folder of the run's own: for a script that writes checkpoints itself."""
    policy: dict[str, float] = Field(default_factory=dict)

    @field_validator("machine")
    @classmethod
    def _machine(cls, value: str) -> str:
        return f"m{value}" if value.isdecimal() else value

    @property
    def base(self) -> str:
        """The fault that opens the incident."""
        if self.fault in CONTROL_FAULTS:
            return self.during or "kill-rank"
        if self.fault == "kill-agent" and self.during == "launch":
            return "kill-rank"
        return self.fault

    @property
    def absorbed(self) -> bool:
        """Whether the job deserves to go on without an incident."""
        return self.base in MACHINE_FAULTS

    def spec(self, name: str, env: dict[str, str]) -> JobSpec:
        """The job of this drill.

        Raises:
            ConfigError: an option makes no sense, or does not fit the job.
        """
        given: dict[str, Any] = {
            "machines": self.machines,
            "ranks_per_machine": self.ranks_per_machine,
            "tp": self.tp,
            "pp": self.pp,
        }
        if self.config is None:
            given = {key: DEFAULTS[key] if value is None else value for key, value in given.items()}
        if self.script:
            given |= {"script": str(Path(self.script[0]).resolve()), "args": self.script[1:]}
        elif self.config is None:
            given |= {"script": str(example("gpt.py")), "args": ["--steps", str(self.total_steps)]}
        spec = load_job(self.config, given)
        if self.steps is not None and "--steps" not in spec.args:  # a script of the user's: handed on
            spec = spec.model_copy(update={"args": [*spec.args, "--steps", str(self.steps)]})
        chosen = set(spec.policy.model_fields_set)
        quick = {} if self.absorbed else DRILL_POLICY  # a job that is held up is no hang
        policy = {**{key: value for key, value in quick.items() if key not in chosen}, **self.policy}
        changed = {"name": name, "env": spec.env | env, "policy": spec.policy.model_copy(update=policy)}
        return JobSpec.model_validate(spec.model_copy(update=changed).model_dump())

    @property
    def total_steps(self) -> int:
        """Steps of the default job."""
        return self.steps if self.steps is not None else max(50, self.at_step + 30)

    @property
    def hold_step(self) -> int:
        """Step at which a job waits until a killed part beside the ranks is back: it must not end before."""
        return self.at_step + min(20, max(self.total_steps - self.at_step - 5, 1))

    def check(self) -> None:
        """Refuse what makes no sense, before anything is started.

        Raises:
            ConfigError: wrong usage.
            CannotInject: the fault cannot be injected here.
        """
        kind_of(self.fault)
        if self.base != self.fault:
            kind_of(self.base)
        if self.fault in CONTROL_FAULTS:
            self._check_stage()
        elif self.during and not (self.fault == "kill-agent" and self.during == "launch"):
            raise ConfigError(f"--during {self.during} does not go with {self.fault}: use it with kill-worker")
        if self.signal not in SIGNALS:
            raise ConfigError(f"--signal {self.signal}: use one of {', '.join(SIGNALS)}")
        if self.base == "raise":
            try:
                exception_named(self.exception)
            except ValueError as error:
                raise ConfigError(f"--exception {error}") from error
        if not self.script and self.config is None and self.at_step >= self.total_steps:
            raise ConfigError(
                f"--at-step {self.at_step} is not reached by a job of --steps {self.total_steps}: "
                f"its steps are 0 to {self.total_steps - 1}"
            )
        self._check_places(self.spec("drill", {}))

    def _check_stage(self) -> None:
        if self.at_event is not None and (self.fault != "kill-worker" or self.in_stage):
            raise ConfigError("--at-event goes with kill-worker and without --in-stage")
        if self.at_event is None and self.in_stage not in STAGES:
            raise ConfigError(f"--in-stage {self.in_stage or 'is missing'}: use one of {', '.join(STAGES)}")
        if self.moment not in MOMENTS:
            raise ConfigError(f"--moment {self.moment}: use one of {', '.join(MOMENTS)}")
        if self.base not in RANK_FAULTS:
            raise ConfigError(f"--during {self.base} opens no incident: use one of {', '.join(RANK_FAULTS)}")

    def _check_places(self, spec: JobSpec) -> None:
        topology = spec.topology()
        for rank in self.ranks:
            if not 0 <= rank < topology.world_size:
                raise ConfigError(f"--rank {rank} does not exist: ranks go from 0 to {topology.world_size - 1}")
        names = machine_names(spec.machines)
        if self.machine and self.machine not in names:
            raise ConfigError(f"--machine {self.machine} does not exist: machines are {', '.join(names)}")

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """The ranks that the fault strikes."""
        if self.ranks:
            return list(dict.fromkeys(self.ranks))
        if self.machine:
            return [spec.topology().ranks(machine_names(spec.machines).index(self.machine))[0]]
        return [spec.topology().world_size - 1]

    def struck_machine(self, spec: JobSpec) -> str:
        """The machine that the fault strikes."""
        return self.machine or f"m{spec.topology().machine(self.struck_ranks(spec)[0])}"


def machine_names(count: int) -> Sequence[str]:
    """Names of a local cluster's machines, without its standbys."""
    return [f"m{index}" for index in range(count)]


def example(name: str) -> Path:
    """An example script of this checkout.

    Raises:
        ConfigError: it is not there.
    """
    path = Path(__file__).resolve().parents[2] / "examples" / name
    if not path.exists():
        raise ConfigError(f"the example {path} is missing: name a script of yours after '--'")
    return path
