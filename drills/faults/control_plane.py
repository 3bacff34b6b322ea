"""Faults of the control plane, in a stage of the incident that another fault opens.

Workers perform them themselves (``drills/inject/control_plane.py``).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, SerializeAsAny, field_validator

from drills.faults.devices import DeviceFault
from drills.faults.fault import Fault
from drills.faults.hangs import Hang
from drills.faults.lost_machines import LostMachines
from drills.faults.not_finite import MachineBitflip, NotFinite
from drills.faults.rank_ends import KillRank
from drills.faults.slow import SlowFault, SlowMachine
from drills.faults.updates import BadVersion
from drills.inject.context import DrillContext
from drills.inject.history_watch import watched
from drills.spec.fault import Entry, FaultOptions
from drills.spec.job_options import NOT_ON_THE_COMMAND_LINE, JobOptions
from drills.spec.stages import BEFORE_AN_UPDATE, REPORT, STAGES
from everstep.errors import CannotInject, ConfigError
from everstep.model.job import JobSpec

FIRST = 1
"""Number of a job's first version, to which the rollbacks in drills return."""


class Needs(NamedTuple):
    """The faults whose incident has a certain stage."""

    kinds: tuple[type[FaultOptions], ...]
    example: str
    """Name of one of these faults, for an error message."""
    why: str
    """Why the incidents of other faults do not have the stage."""


FAULTS_OF_STAGE = {
    "vote": Needs((SlowMachine,), "slow-machine", "votes are taken only if steps are slow"),
    "trace": Needs((Hang,), "stop-rank", "ranks are not traced"),
    "diagnose": Needs((NotFinite,), "nan", "machines are tested at once only if a loss is not finite"),
    "replay": Needs((MachineBitflip,), "bitflip", "the job is not run again on groups of its machines"),
    "rollback": Needs((BadVersion,), "bad-version", "no version is rolled back"),
    "restore": Needs((LostMachines, Hang), "kill-machine", "copies are moved only if memory was lost"),
}
"""Stage → the faults whose incident has it; incidents of all faults have the other stages."""


class ControlFault(Fault):
    """A process of the control plane gets a signal in a stage of an incident, or at an event of its history."""

    is_control = True
    incidents_in_soaks: ClassVar = 0
    meets = "stage"
    sends: ClassVar[signal.Signals] = signal.SIGKILL

    in_stage: str = Field(
        "",
        description=f"Stage of the incident: {', '.join((REPORT, *STAGES))}.",
        json_schema_extra={"metavar": "STAGE"},
    )
    moment: Literal["begin", "middle", "end"] = Field("middle", description="The moment in the work of the stage.")
    opened_by: SerializeAsAny[FaultOptions] = Field(
        default_factory=KillRank,
        description="The fault that opens the incident.",
        json_schema_extra=NOT_ON_THE_COMMAND_LINE,
    )

    @field_validator("in_stage")
    @classmethod
    def _known_stage(cls, value: str) -> str:
        if value and value not in (REPORT, *STAGES):
            raise ValueError(f"use one of {', '.join((REPORT, *STAGES))}")
        return value

    @property
    def opening(self) -> Fault:
        """The fault that opens the incident."""
        assert isinstance(self.opened_by, Fault)
        return self.opened_by

    @property
    def process(self) -> str:
        """The name of the process that gets the signal."""
        raise NotImplementedError

    @property
    def strikes_elsewhere(self) -> bool:
        """Whether it strikes at another moment than in a stage."""
        return False

    @property
    def stage_fields(self) -> dict[str, Any]:
        """The fields of the entry that name the stage."""
        version = {"version": FIRST} if self.in_stage == "rollback" else {}
        return {"in_stage": self.in_stage, "moment": self.moment, **version}

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a missing stage, or one that the incident of the other fault does not have."""
        if not (self.in_stage or self.strikes_elsewhere):
            raise ConfigError(f"--in-stage is missing: use one of {', '.join((REPORT, *STAGES))}")
        opening, stage = self.opening, self.in_stage
        opening.refuse(drill, spec)
        if not self._opens_incident(opening):
            raise ConfigError(f"--during {opening.name} opens no incident in which another fault could strike")
        if stage == REPORT and isinstance(opening, DeviceFault | SlowFault):
            raise ConfigError(
                f"--in-stage {REPORT}: the watchers do not report {opening.name} as a failure of the job: "
                "use a later stage"
            )
        if (needs := FAULTS_OF_STAGE.get(stage)) and not isinstance(opening, needs.kinds):
            raise ConfigError(f"--in-stage {stage}: {needs.why}: add --during {needs.example}")
        if stage == "replay" and isinstance(opening, MachineBitflip) and not opening.only_in_job:
            raise ConfigError(
                "--in-stage replay: a test of the machines detects the fault before the replay: add --only-in-job"
            )
        if stage in ("evict", "prepare") and not (opening.stays_away or isinstance(opening, DeviceFault | Hang)):
            raise ConfigError(
                f"--in-stage {stage}: a machine leaves only if it stays away or is at fault: "
                "add --during kill-machine --gone, or --during gpu-lost"
            )
        if stage in BEFORE_AN_UPDATE and not opening.is_update:
            raise ConfigError(f"--in-stage {stage}: add --during update or --during bad-version")
        if stage == "await" and not (isinstance(opening, LostMachines) and opening.standby == "late"):
            raise ConfigError(
                "--in-stage await: the job waits for no machine: add --during kill-machine --gone --standby late"
            )

    @staticmethod
    def _opens_incident(fault: FaultOptions) -> bool:
        sure = fault.finding is not None and fault.finding.sure
        return fault.by_ranks or fault.takes_machines or fault.is_update or fault.is_slowed or sure

    def why_not(self) -> str:
        """Return why the other fault cannot be injected; empty: it can."""
        return self.opening.why_not()

    def describe(self, spec: JobSpec) -> str:
        return f"{self.sends.name} to the {self.process} at stage {self.in_stage}"

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of the other fault."""
        return self.opening.marks

    def victim(self, processes: Callable[[], Mapping[str, int]]) -> dict[str, Any]:
        """Return the fields of the entry that name the process; by default none, since the worker itself is killed."""
        return {}

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """Return the entries of the other fault, then the entry at which the process is killed."""
        entry = {"id": f"{self.name}-{spec.name}", "fault": self.name, "job": spec.name, "signal": int(self.sends)}
        return [*self.opening.worker_entries(spec, plan, processes), entry | self.stage_fields | self.victim(processes)]

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """Prepare the other fault."""
        return self.opening.prepared(context)

    async def strike(self, context: DrillContext) -> None:
        """Inject the other fault."""
        await self.opening.strike(context)


class KillWorker(ControlFault):
    """The worker that executes the stage is killed."""

    name = "kill-worker"
    summary = "SIGKILL of the worker in the given stage of an incident, or at the given event"
    process: ClassVar = "worker"

    at_event: int | None = Field(
        None,
        ge=1,
        description="Number of an event of the history, instead of a stage.",
        json_schema_extra={"metavar": "N"},
    )

    @property
    def strikes_elsewhere(self) -> bool:
        """Whether it strikes at an event."""
        return self.at_event is not None

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a drill that names both a stage and an event, or neither of them."""
        if self.at_event is not None and self.in_stage:
            raise ConfigError("--at-event cannot be combined with --in-stage")
        super().refuse(drill, spec)

    def describe(self, spec: JobSpec) -> str:
        if self.at_event is None:
            return super().describe(spec)
        return f"SIGKILL to the worker at event {self.at_event} of {self.opening.swept(spec.name)}"

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        *before, entry = super().worker_entries(spec, plan, processes)
        if self.at_event is not None:
            del entry["in_stage"], entry["moment"]
            entry |= {"at_event": self.at_event, "workflow_id": self.opening.swept(spec.name)}
        return [*before, entry]

    @contextmanager
    def prepared(self, context: DrillContext) -> Iterator[None]:
        """Watch the history if the worker is to be killed at one of its events."""
        with super().prepared(context), watched(context):
            yield


class DrainWorker(ControlFault):
    """The worker that executes the stage is drained, as by ``systemctl stop``; the supervisor starts another one."""

    name = "drain-worker"
    summary = "SIGTERM of the worker in the given stage of an incident: it hands over its activities"
    process: ClassVar = "worker"
    sends = signal.SIGTERM


class KillTemporal(ControlFault):
    """The Temporal server is killed."""

    name = "kill-temporal"
    summary = "SIGKILL of the Temporal server in the given stage of an incident"
    process: ClassVar = "Temporal server"

    def victim(self, processes: Callable[[], Mapping[str, int]]) -> dict[str, Any]:
        pid = processes().get("temporal")
        if pid is None:
            raise CannotInject("kill-temporal: the Temporal server does not belong to this cluster")
        return {"pid": pid}
