"""The request of a drill: a fault with its options, and the job that it strikes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import SerializeAsAny, model_validator

from controlplane.files import file_of_ours
from controlplane.job_file.job_file import load_job
from drills.spec import settings
from drills.spec.fault import DEFAULT_SIZES, LOSS, THEN_AFTER, FaultOptions
from drills.spec.job_options import JobOptions
from drills.spec.loss import Loss
from everstep.errors import ConfigError
from everstep.model.job import JobSpec

PACE, UNEVEN = "--step-seconds", "--uneven"
"""Options of the example: the length of its steps, and additional work for ranks."""
LAYERS = 1
"""Number of layers of the example: few, since their communication is slow on one computer."""


class DrillRequest(JobOptions):
    """The request of one drill. ``drills.faults.all.drill_request`` makes it from the names of the command line."""

    fault: SerializeAsAny[FaultOptions]

    @model_validator(mode="after")
    def _has_a_past(self) -> DrillRequest:
        """Move the fault to a later step if it needs more steps before it."""
        self.__dict__["at_step"] = max(self.at_step, self.opening.least_step)
        return self

    @property
    def opening(self) -> FaultOptions:
        """The fault that opens the incident."""
        return self.fault.opening

    def with_spare(self, spare: int) -> DrillRequest:
        """Return this request on a cluster with this many spare machines."""
        return self.model_copy(update={"spare": spare, "replaces": self.opening.is_replaced and spare > 0})

    @property
    def absorbed(self) -> bool:
        """Whether the job should continue without an incident."""
        return self.opening.absorbed and not self.replaces

    @property
    def only_reported(self) -> bool:
        """Whether the job should continue while an incident only reports the fault."""
        return self.opening.only_reported and not self.replaces

    @property
    def waits_at_hold(self) -> bool:
        """Whether the job waits at a later step until the injector is done, so that the job does not end first."""
        return (self.absorbed and not self.opening.is_silent) or self.replaces or self.opening.is_update

    @property
    def total_steps(self) -> int:
        """The number of steps of the default job."""
        replaced = settings.REPLACED_STEPS if self.replaces and not self.opening.is_slowed else 0
        return self.steps if self.steps is not None else max(50, self.at_step + self.opening.steps_after + replaced)

    @property
    def hold_step(self) -> int:
        """The step at which the job waits until the injector is done, see ``waits_at_hold``."""
        if self.opening.is_update:
            return self.at_step + THEN_AFTER
        if self.opening.is_slowed:
            return self.total_steps - THEN_AFTER
        after = settings.REPLACED_STEPS if self.replaces else 5
        return self.at_step + min(20, max(self.total_steps - self.at_step - after, 1))

    @property
    def strike_hold(self) -> int | None:
        """The step at which the job waits for the strike, so that all copies are known; None: it does not wait."""
        delay = self.opening.strike_delay
        return None if delay is None else self.at_step + delay

    def leaving(self, spec: JobSpec) -> list[str]:
        """Return the machines that must leave the job: all machines at fault, or none if there are not enough
        replacements."""
        if self.opening.parks:
            return []
        names = [self.opening.struck_machine(spec)] if self.replaces else self.opening.leaving(spec)
        return sorted(names) if len(names) <= self.spare else []

    def spec(self, name: str, env: dict[str, str], *, disk: Path = Path("disk")) -> JobSpec:
        """Return the job of this drill.

        Args:
            name: Name of the job.
            env: Environment variables of its ranks, in addition to those of the job file.
            disk: Folder for checkpoints, which outlives machines.

        Raises:
            ConfigError: an option makes no sense, or does not fit the job.
        """
        values: dict[str, Any] = {
            "machines": self.machines,
            "ranks_per_machine": self.ranks_per_machine,
            "tp": self.tp,
            "pp": self.pp,
        }
        if self.config is None:
            defaults = self.opening.sizes | ({"tp": None, "pp": None} if self.mesh else {})
            values = {key: defaults[key] if value is None else value for key, value in values.items()}
        values |= {"mesh": self.mesh or None, "groups": self.groups or None}
        if self.script:
            values |= {"script": str(Path(self.script[0]).resolve()), "args": self.script[1:]}
        elif self.config is None:
            values |= {"script": str(example("gpt.py")), "args": self._arguments()}
        spec = load_job(self.config, values)
        if self.steps is not None and "--steps" not in spec.args:  # the user's own script
            spec = spec.model_copy(update={"args": [*spec.args, "--steps", str(self.steps)]})
        return self._with_policies(spec, name, env, disk)

    def _with_policies(self, spec: JobSpec, name: str, env: dict[str, str], disk: Path) -> JobSpec:
        """Return the job with the policies that the fault needs; values of the job file win."""
        waits = (self.absorbed or self.replaces) and not self.opening.is_slowed
        patience = settings.WAITING if waits else self.opening.patience
        chosen, kept = spec.policy.chosen(), set(spec.checkpoint.model_fields_set)
        policy = {**{key: value for key, value in patience.items() if key not in chosen}, **self.policy}
        # The example saves every step, so that it is known how many steps a fault may cost.
        needed = {"save_every_steps": 1} if self.config is None and not self.script else {}
        needed |= self.opening.checkpoint(disk)
        checkpoint = {key: value for key, value in needed.items() if key not in kept}
        changed = {
            "name": name,
            "env": spec.env | env,
            "policy": spec.policy.changed(policy),
            "checkpoint": spec.checkpoint.model_copy(update=checkpoint),
        }
        return JobSpec.model_validate(spec.model_copy(update=changed).model_dump())

    def _arguments(self) -> list[str]:
        """Return the arguments of the example: number of steps, work in a step, layers, and length of a step."""
        layers = max(LAYERS, DEFAULT_SIZES["pp"] if self.pp is None else self.pp)
        seconds = self.opening.step_s if self.step_seconds is None else self.step_seconds
        pace = [] if seconds is None else [PACE, str(seconds)]
        load = self.opening.load(self.at_step)
        return ["--steps", str(self.total_steps), *load, "--layers", str(layers), *pace]

    def describe(self, spec: JobSpec) -> str:
        """Return the announcement of the drill, in one line."""
        opening = self.opening
        line = f"{opening.describe(spec)} at step {self.at_step}"
        if opening.repeats > 1:
            line += f", {opening.repeats} times"
        if lost := _in_words(opening.loss(spec)):
            line = line.replace(LOSS, lost) if LOSS in line else f"{line}; then {lost}"
        return line if self.fault is opening else f"{line}, then {self.fault.describe(spec)}"


def _in_words(loss: Loss) -> str:
    if loss.machines:
        names = " and ".join(f"m{index}" for index in loss.machines)
        return f"SIGKILL to all processes of {names}, with loss of memory{' and disk' if loss.disks else ''}"
    if loss.ranks:
        return f"SIGKILL to {' and '.join(f'rank {rank}' for rank in loss.ranks)}"
    return ""


def example(name: str) -> Path:
    """Return the path of one of everstep's example scripts.

    Raises:
        ConfigError: the script does not exist.
    """
    path = file_of_ours(f"examples/{name}")
    if not path.exists():
        raise ConfigError(f"the example {path} is missing: name a script of yours after '--'")
    return path
