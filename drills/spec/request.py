"""What a drill is asked to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from controlplane.files import file_of_ours
from controlplane.job_file.job_file import load_job
from drills.spec import settings
from drills.spec.catalogue import (
    AWAY,
    CARDS,
    CONTROL_FAULTS,
    DAMAGE,
    DEVICES,
    MACHINE_FAULTS,
    NOT_FINITE,
    RANK_FAULTS,
    SLOWED,
    UPDATES,
)
from drills.spec.settings import machine_names
from everstep.errors import ConfigError
from everstep.model.job import JobSpec
from everstep.model.job_state import incident_workflow_id, replay_workflow_id
from everstep.model.recovery_policy import RecoveryPolicy

UNEVEN_MS = 30
"""More to compute than the other ranks have, milliseconds of CPU time."""
DEFAULTS: dict[str, Any] = {"machines": 4, "ranks_per_machine": 2, "tp": 2, "pp": 2}
"""Sizes of the job of a drill."""
ALIKE: dict[str, Any] = {"machines": 4, "ranks_per_machine": 1, "tp": 1, "pp": 1}
"""The same where ranks are to have many peers that do the same."""
PACE, UNEVEN = "--step-seconds", "--uneven"
"""The example's options for the length of its steps, and for ranks that have more to compute."""
LIGHT = ["--seq", "16", "--dim", "88"]
"""Little to compute in a step of the example, and a state as large as ever: that is what a drill is about."""
LAYERS = 1
"""Few, for they exchange data, which on one machine costs more than all that is computed in between."""
THEN_AFTER = 10
"""Steps between the first and the second fault of a drill that has two."""


class DrillRequest(BaseModel):
    """One drill: the fault, its options and the job.

    ``None`` means: what suits the fault.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fault: str
    ranks: list[int] = Field(default_factory=list, description="Ranks that the fault strikes; default: the last.")
    signal: str = "KILL"
    code: int | None = Field(None, ge=0, le=255)
    """Exit code of a rank, by default 1; of an Xid its number, by default 79."""
    exception: str = "RuntimeError"
    reason: str = ""
    """machine-fault: the reason code that an inspection is to find."""
    everywhere: bool = False
    """xid, machine-fault: on all machines of the job at once."""
    count: int = Field(2, ge=1)
    """hang-agents: of so many machines, the last ones of the job."""
    standby: str = ""
    """kill-machine --gone: what is wrong with the machine that is to take the place."""
    machine: str = ""
    """``m2`` or ``2``; default: the machine of the struck rank, or the last one."""
    at_step: int = Field(20, ge=0)
    times: int = Field(1, ge=1, le=20, description="The fault comes again at that step, after each recovery.")
    in_stage: str = ""
    at_event: int | None = Field(None, ge=1, description="Instead of a stage: an event of the incident's history.")
    during: str = ""
    moment: str = "middle"
    kind: str = ""
    index: int = Field(0, ge=0)
    where: str = ""
    fits: str = "nothing"
    then: str = ""
    seconds: float = Field(6.0, gt=0, le=300)
    cut_from: str = "control"
    factor: float = Field(2.0, ge=1.5, le=20)
    """slow-machine, uneven-work, slow-link: how many times as long steps are to take, about."""
    between: tuple[str, str] | None = None
    """slow-link, cut-link: two machines; default: the struck one and the one before it."""
    lazy: bool = False
    """The update waits for ``then``, or for the end of its window; else it is urgent."""
    window: float = Field(0.0, ge=0, description="After which a lazy update is forced, seconds; 0: it rides on then.")
    at_start: bool = False
    """The bad version fails at its import, else …"""
    fails_after: int = Field(1, ge=0, description="… after so many steps of its own, or …")
    changes_state: bool = False
    """… as it restores a state that lacks a parameter."""
    only_in_job: bool = False
    """bitflip: not in tests, and not where a job has one machine."""
    shows_every: int = Field(1, ge=0)
    """The same: in a replay in every so many runs only; 0: in none."""
    finite: bool = False
    """bitflip: all numbers stay finite; a check of the script, on another machine, aborts the job for it."""
    neutral: bool = False
    """The update changes no loss: for a job that is held against one without updates."""
    machines: int | None = None
    ranks_per_machine: int | None = None
    tp: int | None = None
    pp: int | None = None
    mesh: str = ""
    """Instead of tp and pp: all axes, ``dp_replicate=2,dp_shard=2``."""
    groups: list[str] = Field(default_factory=list, description="Groups that are laid over axes: ep=4:dp_shard+tp.")
    standbys: int = Field(1, ge=0)
    gone: bool = False
    """The machines that are killed do not come back."""
    spare: int = Field(0, ge=0)
    """Machines that can take the place of others; known once there is a cluster."""
    replaces: bool = False
    """The machine whose device breaks leaves the job for one of them."""
    steps: int | None = Field(None, ge=1)
    step_seconds: float | None = Field(None, ge=0)
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

    def swept(self, job: str) -> str:
        """In which workflow's history ``at_event`` is: the first incident's, or, where it takes one, the replay's."""
        # A NaN is seen once the restart that follows its tests is confirmed: the replay is the second incident's. What
        # aborts in its first step again is the first one's.
        number = 1 if self.finite else 2
        return replay_workflow_id(job, number, 1) if self.only_in_job else incident_workflow_id(job, 1)

    @property
    def asked_during(self) -> str:
        """In the middle of what an update is asked for, see ``drills/spec/updates.py``."""
        return self.during if self.fault in UPDATES else ""

    @property
    def kills_ranks(self) -> bool:
        """Whether ranks are killed beside what the fault itself is."""
        if self.base in UPDATES:
            return self.asked_during == "kill-rank" or self.then in ("kill-rank", "kill-forkserver")
        return self.base in ("kill-postgres", "kill-workers", "hang-agents")

    @property
    def xid_code(self) -> int:
        """The number of an Xid; by default that of a GPU that fell off the bus."""
        return 79 if self.code is None else self.code

    @property
    def exit_code(self) -> int:
        """With which a rank leaves."""
        return 1 if self.code is None else self.code

    @property
    def shows_not_finite(self) -> bool:
        """Whether it shows as a loss, or a gradient norm, that is not finite."""
        return self.base in NOT_FINITE and not self.finite

    @property
    def bound(self) -> bool:
        """Whether the fault stays with a machine, whichever ranks run there: it is broken."""
        return self.base == "nan" and self.machine != "" and not self.ranks

    @model_validator(mode="after")
    def _comes_again(self) -> DrillRequest:
        """What is bound to a machine is there after each recovery, until the job is parked."""
        if self.bound:
            self.__dict__["times"] = max(self.times, RecoveryPolicy().retry.max_failures_at_step)
        return self

    @model_validator(mode="after")
    def _has_a_past(self) -> DrillRequest:
        """A job becomes slower than it was: it has to have been as it was for some time."""
        if self.base in SLOWED:
            self.__dict__["at_step"] = max(self.at_step, settings.SLOW_AT)
        return self

    @property
    def is_slowed(self) -> bool:
        """Whether steps go on, and take longer."""
        return self.base in SLOWED

    @property
    def absorbed(self) -> bool:
        """Whether the job deserves to go on without an incident."""
        beside = (*MACHINE_FAULTS, *DEVICES, *SLOWED)
        if self.base == "bad-version":
            return self.at_start
        return (self.base in beside and not self.then and not self.replaces) or self.base in ("hang-peer", "cut-off")

    @property
    def waits_at_hold(self) -> bool:
        """Whether the job waits at a later step until the injector is done: it must not end before."""
        return (self.absorbed and not self.is_silent) or self.replaces or self.base in UPDATES

    @property
    def is_silent(self) -> bool:
        """Whether an agent says nothing while its ranks go on stepping: a job that waited would be silent too."""
        return self.base == "hang-peer" or (self.base == "kill-agent" and self.gone)

    @property
    def comes_by_itself(self) -> bool:
        """Whether a job that is parked goes on without an operator: what it lacks comes back, or comes late."""
        return self.needs_network or self.base == "hang-agents" or self.standby == "late"

    @property
    def needs_network(self) -> bool:
        """Whether the machines need a network of their own."""
        return self.base in (*AWAY, *CARDS, "slow-link")

    @property
    def strikes_all(self) -> bool:
        """Whether a device of every machine breaks."""
        return self.everywhere or self.base == "switch-down"

    @property
    def parks(self) -> bool:
        """Whether the job deserves to be parked: nothing but a person can help."""
        return (self.base == "shm-full" and self.fits == "nothing") or self.shows_every == 0

    @property
    def outside(self) -> bool:
        """Whether the injector acts, and not the ranks themselves."""
        return self.base not in RANK_FAULTS

    def spec(self, name: str, env: dict[str, str], *, disk: Path = Path("disk")) -> JobSpec:
        """The job of this drill.

        Args:
            name: its name.
            env: environment of its ranks beside the job file's.
            disk: folder that outlives machines, for checkpoints on disk.

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
            defaults = (ALIKE if self.is_slowed else DEFAULTS) | ({"tp": None, "pp": None} if self.mesh else {})
            values = {key: defaults[key] if value is None else value for key, value in values.items()}
        values |= {"mesh": self.mesh or None, "groups": self.groups or None}
        if self.script:
            values |= {"script": str(Path(self.script[0]).resolve()), "args": self.script[1:]}
        elif self.config is None:
            values |= {
                "script": str(example("gpt.py")),
                "args": ["--steps", str(self.total_steps), *self._load(), *self._layers(), *self._pace()],
            }
        spec = load_job(self.config, values)
        if self.steps is not None and "--steps" not in spec.args:  # a script of the user's: handed on
            spec = spec.model_copy(update={"args": [*spec.args, "--steps", str(self.steps)]})
        chosen = spec.policy.chosen()
        policy = {**{key: value for key, value in self._patience().items() if key not in chosen}, **self.policy}
        kept = set(spec.checkpoint.model_fields_set)
        opens = self.then if self.base in UPDATES else self.base
        needed = settings.checkpoint_settings(opens, where=self.where, fits=self.fits, disk=disk)
        checkpoint = {key: value for key, value in needed.items() if key not in kept}
        changed = {
            "name": name,
            "env": spec.env | env,
            "policy": spec.policy.changed(policy),
            "checkpoint": spec.checkpoint.model_copy(update=checkpoint),
        }
        return JobSpec.model_validate(spec.model_copy(update=changed).model_dump())

    def _patience(self) -> dict[str, Any]:
        if self.is_slowed:
            return settings.SLOW_POLICY
        if self.absorbed or self.replaces:
            return settings.HELD  # a job that is held up is no hang
        if self.base in UPDATES:
            return settings.GONE_PATIENT if self.gone else settings.PATIENT_POLICY
        if self.gone or self.base == "hang-agents":
            return settings.GONE_POLICY if self.strike_hold is None else settings.GONE_PATIENT
        if self.only_in_job:
            return settings.DRILL_POLICY | settings.SHORT_REPLAY | {"replay.fault_share": 1.0 / (self.shows_every or 2)}
        patience = settings.DRILL_POLICY if self.strike_hold is None else settings.PATIENT_POLICY
        return patience | (settings.NOBODY_LEAVES if self.base in DEVICES else {})

    def _load(self) -> list[str]:
        """What there is to compute in a step."""
        if self.base != "uneven-work":
            return LIGHT
        rank = self.ranks[0] if self.ranks else 0
        heavy = [UNEVEN, str(rank), "0", str(UNEVEN_MS)]
        return [*LIGHT, *heavy, UNEVEN, "-1", str(self.at_step), str(round(UNEVEN_MS * self.factor))]

    def _layers(self) -> list[str]:
        """At least one for each stage of the pipeline."""
        return ["--layers", str(max(LAYERS, DEFAULTS["pp"] if self.pp is None else self.pp))]

    def _pace(self) -> list[str]:
        """How long the example's steps are made to last."""
        seconds = self.step_seconds
        # A loss is looked at twice a second: the job must not end before.
        paced = self.outside and (self.base not in MACHINE_FAULTS or self.is_silent)
        if seconds is None and (paced or self.base in NOT_FINITE):
            seconds = settings.SLOW_STEP_S if self.is_slowed else settings.STEP_S
        return [] if seconds is None else [PACE, str(seconds)]

    @property
    def total_steps(self) -> int:
        """Steps of the default job."""
        if self.is_slowed and self.steps is None:
            return self.at_step + settings.SLOW_STEPS
        more = settings.SILENT_STEPS if self.is_silent and self.base == "kill-agent" else 30
        more += settings.REPLACED_STEPS if self.replaces else 0
        return self.steps if self.steps is not None else max(50, self.at_step + more)

    @property
    def hold_step(self) -> int:
        """Step at which a job waits until a part beside the ranks is back, see ``waits_at_hold``."""
        if self.base in UPDATES:
            return self.at_step + THEN_AFTER
        if self.is_slowed:
            return self.total_steps - THEN_AFTER
        after = settings.REPLACED_STEPS if self.replaces else 5
        return self.at_step + min(20, max(self.total_steps - self.at_step - after, 1))

    @property
    def strike_hold(self) -> int | None:
        """Step at which a job waits for a strike at copies that are known exactly; None: it is struck as it runs."""
        if self.base in DAMAGE or self.base == "disk-full" or (self.base == "shm-full" and not self.parks):
            return self.at_step
        if self.standby == "sick":  # an inspection has to find that first
            return self.at_step
        return self.at_step + THEN_AFTER if self.struck_again else None

    @property
    def struck_again(self) -> bool:
        """Whether a second fault follows once the first is over."""
        return self.base == "kill-peer" or (self.base in ("kill-agent", *DEVICES) and bool(self.then))

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """The ranks that the fault strikes."""
        if self.ranks:
            return list(dict.fromkeys(self.ranks))
        if self.base == "hang-agents":
            return [0]
        if self.base == "wrong-order":
            return list(range(spec.topology().world_size))
        if self.machine:
            return [spec.topology().ranks(machine_names(spec.machines).index(self.machine))[0]]
        return [spec.topology().world_size - 1]

    def ends(self, spec: JobSpec) -> tuple[str, str]:
        """The two machines at the ends of a link, in the job's order."""
        names = machine_names(spec.machines)
        index = self.target_machine_index(spec)
        one, other = sorted(self.between or (names[index - 1], names[index]), key=names.index)
        return one, other

    def struck_machine(self, spec: JobSpec) -> str:
        """The machine that the fault strikes."""
        return self.machine or f"m{self.target_machine_index(spec)}"

    def target_machine_index(self, spec: JobSpec) -> int:
        """Its place among the job's machines; of an agent that receives backups: that of the struck rank's peer."""
        topology = spec.topology()
        if self.machine:
            return machine_names(spec.machines).index(self.machine)
        rank = self.struck_ranks(spec)[0]
        peer = settings.placement_of(spec).peers[rank] if self.base == "kill-peer" else None
        return topology.machine(rank if peer is None else peer)


def example(name: str) -> Path:
    """One of everstep's example scripts.

    Raises:
        ConfigError: it is not there.
    """
    path = file_of_ours(f"examples/{name}")
    if not path.exists():
        raise ConfigError(f"the example {path} is missing: name a script of yours after '--'")
    return path
