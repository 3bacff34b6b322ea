"""The control plane dies in a stage of the incident that another fault opens (``drills/inject/control_plane.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, SerializeAsAny, field_validator

from drills.faults.devices import DeviceFault
from drills.faults.fault import Fault
from drills.faults.hangs import Hang
from drills.faults.kill_rank import KillRank
from drills.faults.lost_machines import LostMachines
from drills.faults.not_finite import MachineBitflip, NotFinite
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
"""Number of a job's first version; rollbacks in these drills go back to it."""


class Needs(NamedTuple):
    """The faults whose incident has a certain stage."""

    kinds: tuple[type[FaultOptions], ...]
    names: str
    why: str
    """Why other faults do not fit."""


OF_FAULTS = {
    "vote": Needs((SlowMachine,), "slow-machine", "nobody looks for a slow machine"),
    "trace": Needs((Hang,), "stop-rank", "ranks are not traced"),
    "diagnose": Needs((NotFinite,), "nan", "machines are tested at once only where a loss is not finite"),
    "replay": Needs((MachineBitflip,), "bitflip", "the job is not run again on groups of its machines"),
    "rollback": Needs((BadVersion,), "bad-version", "no code is taken back"),
    "restore": Needs((LostMachines, Hang), "kill-machine", "copies are moved only where memory was lost"),
}


class ControlFault(Fault):
    """A process of the control plane dies in a stage of an incident, or at an event of its history."""

    is_control = True
    meets = "stage"

    in_stage: str = Field(
        "",
        description=f"Stage of the incident: {', '.join((REPORT, *STAGES))}.",
        json_schema_extra={"metavar": "STAGE"},
    )
    moment: Literal["begin", "middle", "end"] = Field("middle", description="When in the work of the stage.")
    opened_by: SerializeAsAny[FaultOptions] = Field(
        default_factory=KillRank,
        description="The fault that opens the incident.",
        json_schema_extra=NOT_ON_THE_COMMAND_LINE,
    )

    @field_validator("in_stage")
    @classmethod
    def _exists(cls, value: str) -> str:
        if value and value not in (REPORT, *STAGES):
            raise ValueError(f"use one of {', '.join((REPORT, *STAGES))}")
        return value

    @property
    def opening(self) -> Fault:
        """The other fault, which opens the incident."""
        assert isinstance(self.opened_by, Fault)
        return self.opened_by

    @property
    def process(self) -> str:
        """The process that dies, as text."""
        raise NotImplementedError

    @property
    def place(self) -> dict[str, Any]:
        """The stage or event at which it dies."""
        version = {"version": FIRST} if self.in_stage == "rollback" else {}
        return {"in_stage": self.in_stage, "moment": self.moment, **version}

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a stage that the other fault's incident does not have."""
        opening, stage = self.opening, self.in_stage
        opening.refuse(drill, spec)
        if not self._opens_incident(opening):
            raise ConfigError(f"--during {opening.name} opens no incident that anything could strike in")
        leaves_late = isinstance(opening, DeviceFault | SlowFault)
        if leaves_late and stage == REPORT:
            raise ConfigError(f"--in-stage {REPORT}: {opening.name} hurts no rank: name a later stage")
        if (needs := OF_FAULTS.get(stage)) and not isinstance(opening, needs.kinds):
            raise ConfigError(f"--in-stage {stage}: {needs.why}: add --during {needs.names}")
        if stage == "replay" and isinstance(opening, MachineBitflip) and not opening.only_in_job:
            raise ConfigError("--in-stage replay: a test finds the machine before: add --only-in-job")
        if stage in ("evict", "prepare") and not (opening.stays_away or isinstance(opening, DeviceFault | Hang)):
            raise ConfigError(
                f"--in-stage {stage}: machines leave only where they stay away, or are at fault: "
                "add --during kill-machine --gone, or --during gpu-lost"
            )
        if stage in BEFORE_AN_UPDATE and not opening.is_update:
            raise ConfigError(f"--in-stage {stage}: add --during update or --during bad-version")
        if stage == "await" and not (isinstance(opening, LostMachines) and opening.standby == "late"):
            raise ConfigError(
                "--in-stage await: nothing is waited for: add --during kill-machine --gone --standby late"
            )

    @staticmethod
    def _opens_incident(fault: FaultOptions) -> bool:
        sure = fault.finding is not None and fault.finding.sure
        return fault.by_ranks or fault.takes_machines or fault.is_update or fault.is_slowed or sure

    def why_not(self) -> str:
        """Why the other fault cannot be injected; empty: it can."""
        return self.opening.why_not()

    def describe(self, spec: JobSpec) -> str:
        """The process and the stage."""
        return f"SIGKILL to the {self.process} at stage {self.in_stage}"

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of the other fault, which the injector injects."""
        return self.opening.marks

    @property
    def incidents_in_soaks(self) -> int:
        """Zero: this fault opens no incident itself."""
        return 0

    def victim(self, processes: Callable[[], Mapping[str, int]]) -> dict[str, Any]:
        """The part of the entry that names the process; by default it is the worker that meets the entry."""
        return {}

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """The entries of the other fault for workers, then the entry at which the process dies."""
        entry = {"id": f"{self.name}-{spec.name}", "fault": self.name, "job": spec.name}
        return [*self.opening.worker_entries(spec, plan, processes), entry | self.place | self.victim(processes)]

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """Prepare the other fault."""
        return self.opening.prepared(context)

    async def strike(self, context: DrillContext) -> None:
        """Inject the other fault."""
        await self.opening.strike(context)


class KillWorker(ControlFault):
    """The worker that works on the stage dies."""

    name = "kill-worker"
    summary = "SIGKILL of the worker that works on that stage of an incident"

    at_event: int | None = Field(
        None, ge=1, description="Instead of a stage: an event of the history.", json_schema_extra={"metavar": "N"}
    )

    @property
    def process(self) -> str:
        """The worker."""
        return "worker"

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a stage beside an event, or neither of them."""
        if self.at_event is not None and self.in_stage:
            raise ConfigError("--at-event goes without --in-stage")
        if self.at_event is None and not self.in_stage:
            raise ConfigError(f"--in-stage is missing: use one of {', '.join((REPORT, *STAGES))}")
        super().refuse(drill, spec)

    def describe(self, spec: JobSpec) -> str:
        """The stage or the event."""
        if self.at_event is None:
            return super().describe(spec)
        return f"SIGKILL to the worker at event {self.at_event} of {self.opening.swept(spec.name)}"

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """The entries for workers, with the one at which the worker dies."""
        *before, entry = super().worker_entries(spec, plan, processes)
        if self.at_event is not None:
            del entry["in_stage"], entry["moment"]
            entry |= {"at_event": self.at_event, "workflow_id": self.opening.swept(spec.name)}
        return [*before, entry]

    @contextmanager
    def prepared(self, context: DrillContext) -> Iterator[None]:
        """Watch the history, if an event of it kills the worker."""
        with super().prepared(context), watched(context):
            yield


class KillTemporal(ControlFault):
    """The Temporal server dies."""

    name = "kill-temporal"
    summary = "SIGKILL of the Temporal server in that stage of an incident"

    @property
    def process(self) -> str:
        """The server."""
        return "Temporal server"

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a drill without a stage."""
        if not self.in_stage:
            raise ConfigError(f"--in-stage is missing: use one of {', '.join((REPORT, *STAGES))}")
        super().refuse(drill, spec)

    def victim(self, processes: Callable[[], Mapping[str, int]]) -> dict[str, Any]:
        """The server."""
        pid = processes().get("temporal")
        if pid is None:
            raise CannotInject("kill-temporal: the server is not ours to kill")
        return {"pid": pid}
