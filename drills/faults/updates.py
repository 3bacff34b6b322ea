"""Updates of a job's code: good code, and code that fails."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field
from temporalio.service import RPCError, RPCStatusCode

from drills.faults.away import ForSeconds, down, workers
from drills.faults.fault import Fault
from drills.faults.rank_ends import KillRank
from drills.inject import new_code
from drills.inject.context import POLL_S, DrillContext
from drills.judge.facts import DrillFacts
from drills.judge.versions import steps_under_their_versions
from drills.observe.observed import Absence
from drills.spec import settings
from drills.spec.fault import STAGES, STRIKE, Entry, OnMachine, OnRanks
from drills.spec.job_options import NOT_ON_THE_COMMAND_LINE, JobOptions
from drills.spec.loss import Loss
from drills.spec.request import DrillRequest, example
from everstep.decisions.act.versions.book import WAITS
from everstep.errors import ClusterError, ConfigError, EverstepError
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, incident_workflow_id, job_workflow_id
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.topology import Topology
from everstep.model.version import JobVersion, VersionStatus
from everstep.rank import drill_faults as faults

PARKED, AGAIN = "parked", "update"
"""Two states of a job, other than faults, in which an update may be requested: it is parked, or it is being updated."""
WHILE = {
    "kill-rank": "the job recovers from the loss of a rank",
    PARKED: "the job is parked",
    AGAIN: "another update is applied",
    "kill-workers": "no worker runs",
    "kill-temporal": "Temporal is down",
    "kill-agent": "an agent is down",
}
"""State of the job in which an update may be requested → the state in words."""
RATE, OTHER_RATE = 1e-3, 4e-3
"""Learning rates of the example that updates set, so that steps have other losses."""
LR_FROM = "--lr-from"
"""The option of the example that changes its learning rate at a step."""
SIGNALS = 3
"""The same signal is sent this many times, and the update must be applied once."""
TRIED_LIMIT_S = 120.0
"""A version has been tried within this time, even if a part is away at first, seconds."""
ASK_AGAIN_S = 0.2
"""Time between two attempts to reach Temporal, seconds."""
LAZY: tuple[dict[str, Any], ...] = (
    {"lazy": True, "then": "kill-rank"},
    {"lazy": True, "then": "kill-machine"},
    {"lazy": True, "then": "kill-forkserver"},
    {"lazy": True, "window": 2.0},
)
"""Options of lazy updates that a soak draws: the fault whose recovery applies the update, or a window."""
FAILS_AFTER = (0, 1, 2)
"""A soak draws one of these numbers of steps, after which a bad version fails. All are small, so that it fails before
the soak's next gate, the step at which all ranks wait for the checks."""


@dataclass(frozen=True, slots=True)
class ExpectedUpdate:
    """The expected result of an update."""

    incidents: int
    """Number of incidents."""
    generations: int
    """Number of launches of the job."""
    resolution: str
    """Resolution of the last incident; empty: there is none."""
    versions: tuple[VersionStatus, ...]
    """Final status of the job's versions, in order."""


class UpdateFault(OnRanks, OnMachine, ForSeconds, Fault):
    """An update of the job's code: an urgent one is applied at once, a lazy one by the next recovery."""

    is_update = True
    steps_done_anew = True
    stages: ClassVar = ("align", *STAGES)

    lazy: bool = Field(False, description="The update is lazy: applied by the recovery from --then, or after --window.")
    window: float = Field(
        0.0, ge=0, description="With --lazy: seconds after which it is forced.", json_schema_extra={"metavar": "S"}
    )
    then: Literal["", "kill-rank", "kill-machine", "kill-forkserver"] = Field(
        "", description="With --lazy: the fault whose recovery applies it."
    )
    gone: bool = Field(False, description="With --then kill-machine: the machine does not come back.")
    neutral: bool = Field(False, json_schema_extra=NOT_ON_THE_COMMAND_LINE)
    """Whether the update changes no loss, so that the job can be compared with one without updates."""

    @property
    def requested_during(self) -> str:
        """The state of the job in which the update is requested, a key of ``WHILE``; empty: the job steps."""
        return ""

    @property
    def expected(self) -> ExpectedUpdate:
        """The expected result of the update."""
        raise NotImplementedError

    @property
    def lines(self) -> str:
        """The lines that are inserted into the script."""
        return ""

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a lazy update that nothing would apply, or that both a fault and a window would apply."""
        super().refuse(drill, spec)
        if self.lazy != bool(self.then or self.window) or (self.then and self.window):
            raise ConfigError(
                "a lazy update needs --then FAULT, whose recovery applies it, or --window S, after which it is forced: "
                "--lazy takes one of them"
            )
        if self.lazy and self.requested_during:
            raise ConfigError(f"--during {self.requested_during} cannot be combined with --lazy")

    def code_in_words(self) -> str:
        """Return the new code, in words."""
        raise NotImplementedError

    def describe(self, spec: JobSpec) -> str:
        when = f"forced after {self.window:g} s" if self.window else "lazy" if self.lazy else "urgent"
        during = f", requested while {WHILE[self.requested_during]}" if self.requested_during else ""
        return f"an update ({when}) to {self.code_in_words()}{during}"

    @property
    def marks(self) -> tuple[str, ...]:
        """The request, and the strike if there is one."""
        strikes = self.then or self.requested_during == "kill-rank"
        return (self.name, STRIKE) if strikes else (self.name,)

    @property
    def follows(self) -> str:
        return self.then

    @property
    def stays_away(self) -> bool:
        return self.gone

    def loss(self, spec: JobSpec) -> Loss:
        """Return the loss in whose recovery the update is applied or requested; ranks are killed along with a fork
        server."""
        if self.then == "kill-machine":
            return Loss((self.machine_index(spec),))
        kills = self.requested_during == "kill-rank" or self.then in ("kill-rank", "kill-forkserver")
        return Loss(ranks=tuple(self.struck_ranks(spec))) if kills else Loss()

    @property
    def patience(self) -> dict[str, Any]:
        return settings.PATIENT if self.gone else settings.PATIENT_POLICY

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        """Checkpoints on disk if a machine is lost."""
        return settings.disk_settings(disk) if self.then == "kill-machine" else {}

    @property
    def parked_for_a_while(self) -> bool:
        """The job is parked if the update is requested in that state."""
        return self.requested_during == PARKED

    @property
    def incidents_due(self) -> int:
        return self.expected.incidents

    @property
    def launches_due(self) -> int:
        return self.expected.generations

    @property
    def incidents_in_soaks(self) -> int:
        return self.expected.incidents

    def leaving(self, spec: JobSpec) -> list[str]:
        return [f"m{index}" for index in self.loss(spec).machines] if self.gone else []

    # Injection.

    async def strike(self, context: DrillContext) -> None:
        """Request the update, and wait until it is applied; the job must not end first."""
        if self.requested_during == PARKED:
            await _until(context, lambda state: state.status == "parked", "the job was not parked")
        else:
            await context.reach(context.request.at_step)
        match self.requested_during:
            case "kill-rank":
                await context.second_fault(exact=False)
                await _await_stop(context)
                await self._request_and_try(context, 0)
                await _release_stop(context)
            case "kill-workers":
                async with down(context, workers(context)):
                    await self._request(context, 0)
                    await asyncio.sleep(self.seconds)
            case "kill-temporal":
                async with down(context, ["temporal"]):
                    requesting = asyncio.create_task(self._request(context, 0))
                    await asyncio.sleep(self.seconds)
                await requesting
            case "kill-agent":
                async with down(context, [f"agent-{context.target.name}"]):
                    await self._request(context, 0)
                    await asyncio.sleep(self.seconds)
            case state:
                await self._request_and_try(context, 0)
                if state == AGAIN:
                    context.planned.let_go()
                    await _await_stop(context)
                    await self._request_and_try(context, 1)
                    await _release_stop(context)
        await _await_tried(context)
        await self._cause(context)
        context.planned.let_go()
        await _await_applied(context)

    async def _cause(self, context: DrillContext) -> None:
        """Cause a lazy update to be applied: inject the fault of ``--then``, or wait until the window ends."""
        if self.then:
            if self.then == "kill-forkserver" and (server := await context.fork_server(context.target)):
                os.kill(server, signal.SIGKILL)
            await context.second_fault(exact=False)
        elif self.window:
            await _until(
                context,
                lambda state: state.status != "running" or _waits(context, state) is False,
                "the update was not forced",
            )

    async def _request_and_try(self, context: DrillContext, number: int) -> None:
        await self._request(context, number)
        await _await_tried(context)

    async def _request(self, context: DrillContext, number: int) -> None:
        """Write the new code, and send the same signal several times; repeat each until Temporal accepts it."""
        spec = context.spec
        folder = context.planned.plan.with_name(f"{context.planned.plan.name}.code-{number}")
        note = f"update {number + 1} of {context.planned.plan}"
        await asyncio.to_thread(new_code.write, spec, folder, self.lines, note)
        request = self.request_of(spec, folder, number)
        handle = context.cluster.control.client.get_workflow_handle(job_workflow_id(spec.name))
        context.mark(self.name)
        context.seen.update_folders.append(str(folder))
        for _ in range(SIGNALS):
            while True:
                try:
                    await handle.signal("update", request)
                    break
                except RPCError as error:
                    if error.status is RPCStatusCode.NOT_FOUND:
                        raise ClusterError(f"{spec.name} is over, and cannot be updated") from error
                    await asyncio.sleep(ASK_AGAIN_S)

    def request_of(self, spec: JobSpec, folder: Path, number: int) -> dict[str, Any]:
        """Return the argument of the signal.

        Args:
            spec: The job as it was started.
            folder: The folder of the new code.
            number: Number of the update in this drill, from 0 on.
        """
        request: dict[str, Any] = {
            "code": str(folder),
            "urgency": "lazy" if self.lazy else "urgent",
            "operator": "drill",
            "reason": f"update {number + 1} of a drill",
        }
        if self.window:
            request["window_h"] = self.window / 3600
        return request

    async def gather(self, context: DrillContext, facts: DrillFacts) -> None:
        """Add the versions of the job at its end."""
        facts.versions = (await context.cluster.control.state(context.spec.name)).versions

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """The update must have the expected result, and each step must have run under the recorded version."""
        expected, versions = self.expected, facts.versions
        found = [f"{v.name} was applied {len(v.ranges)} times" for v in versions[1:] if len(v.ranges) > 1]
        if tuple(v.status for v in versions) != expected.versions:
            listed = ", ".join(f"v{v.number} {v.status} ({v.why[:100]})" for v in versions)
            found.append(f"the versions are {listed}, and should be {', '.join(expected.versions)}")
        if expected.resolution and (not reports or reports[-1].resolution != expected.resolution):
            resolution = reports[-1].resolution if reports else "nothing"
            found.append(f"the last incident's resolution is {resolution}, and should be {expected.resolution}")
        if expected.resolution == "rollback":
            # A reader needs to know first which operator requested the version.
            nameless = [v for v in versions if v.number > 1 and "by drill" not in v.why]
            found += [f"the reason for {v.name} does not name its operator: {v.why}" for v in nameless]
            texts = " ".join(text for report in reports for text in (report.headline, *report.stages))
            found += [] if "v2, requested by drill" in texts else ["the incident does not name the suspect"]
        return found + steps_under_their_versions(versions, facts.records)


class Update(UpdateFault):
    """An update with good code."""

    name = "update"
    summary = "a hot update of the code, requested three times by the same signal"

    during: Literal["", "kill-rank", "parked", "update", "kill-workers", "kill-temporal", "kill-agent"] = Field(
        "", description="The state of the job in which the update is requested."
    )

    @property
    def requested_during(self) -> str:
        return self.during

    @property
    def expected(self) -> ExpectedUpdate:
        """One incident applies the update."""
        running, replaced = VersionStatus.RUNNING, VersionStatus.REPLACED
        if self.during == PARKED:
            tries = RecoveryPolicy().retry.max_failures_at_step
            return ExpectedUpdate(1, tries + 1, "update", (replaced, running))
        if self.during == AGAIN:
            return ExpectedUpdate(1, 2, "update", (replaced, VersionStatus.SUPERSEDED, running))
        return ExpectedUpdate(1, 2, "eviction" if self.gone else "update", (replaced, running))

    def code_in_words(self) -> str:
        return "other learning rates" if self.during == AGAIN else "another learning rate"

    def rank_entries(self, at_step: int, spec: JobSpec, plan: Path) -> list[Entry]:
        """Return the entries that make the job be parked, if it should be: a rank is killed again and again."""
        if self.during != PARKED:
            return []
        kills = KillRank(ranks=self.struck_ranks(spec), times=RecoveryPolicy().retry.max_failures_at_step)
        return kills.rank_entries(at_step, spec, plan)

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """Return a hold, so that the incident waits in its stop until the update was requested."""
        if self.during not in ("kill-rank", AGAIN):
            return []
        stage = {"job": spec.name, "in_stage": "stop", "moment": "middle"}
        return [{"id": f"stop-{spec.name}", "fault": "hold", **stage, "until": f"{plan}.tried"}]

    def request_of(self, spec: JobSpec, folder: Path, number: int) -> dict[str, Any]:
        """Return the argument of the signal, with another learning rate if the script is the example."""
        request = super().request_of(spec, folder, number)
        if self._changes_losses(spec):
            request["args"] = [*spec.args, LR_FROM, "0", str((RATE, OTHER_RATE)[number])]
        return request

    def _changes_losses(self, spec: JobSpec) -> bool:
        return not self.neutral and Path(spec.script) == example("gpt.py")

    def reference(self, spec: JobSpec, versions: Sequence[JobVersion]) -> JobSpec:
        """Return the job whose script itself changes the learning rate, at the steps at which the updates were
        applied."""
        if not self._changes_losses(spec):
            return spec
        applied = sorted(v.ranges[-1] + (v.number,) for v in versions if v.number > 1 and v.ranges)
        changes = [word for _, begin, _, number in applied for word in (LR_FROM, str(begin), _rate(versions, number))]
        return spec.model_copy(update={"args": [*spec.args, *changes]})

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw an urgent or a lazy update; together with another fault always a plain urgent one."""
        return rng.choice(({}, {"during": "kill-workers"}, {"during": "kill-agent"}, *LAZY)) if alone else {}


class BadVersion(UpdateFault):
    """An update with code that fails."""

    name = "bad-version"
    summary = "a hot update whose code fails: at its import, after some steps, or in its restore"

    at_start: bool = Field(False, description="The code fails at its import.")
    fails_after: int = Field(
        1, ge=0, description="Number of steps after which the code fails.", json_schema_extra={"metavar": "N"}
    )
    changes_state: bool = Field(False, description="The code has a parameter that the saved state lacks.")

    @property
    def expected(self) -> ExpectedUpdate:
        """The version is refused at its import, or rolled back: if it fails before its first step, by the same
        incident."""
        running = VersionStatus.RUNNING
        if self.at_start:
            return ExpectedUpdate(0, 1, "", (running, VersionStatus.REFUSED))
        incidents = 1 if self.changes_state or self.fails_after == 0 else 2
        return ExpectedUpdate(incidents, 3, "rollback", (running, VersionStatus.SUSPECT))

    @property
    def absorbed(self) -> bool:
        """Code that cannot be imported is refused, so the job continues."""
        return self.at_start

    @property
    def lines(self) -> str:
        if self.at_start:
            return new_code.AT_START
        return new_code.CHANGES_STATE if self.changes_state else new_code.AFTER_STEPS.format(steps=self.fails_after)

    def code_in_words(self) -> str:
        if self.at_start:
            return "code that cannot be imported"
        if self.changes_state:
            return "code with one more parameter"
        return f"code that fails after {self.fails_after} steps"

    async def _cause(self, context: DrillContext) -> None:
        if not self.at_start:
            await super()._cause(context)
            return
        mark = context.fired(self.name)
        assert mark is not None
        context.seen.absence = Absence(int(str(mark["time_ns"])), time.time_ns())

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        fails_after = ({"fails_after": steps} for steps in FAILS_AFTER)
        return rng.choice(({"at_start": True}, {"changes_state": True}, *fails_after))


def _rate(versions: Sequence[JobVersion], number: int) -> str:
    """Return the learning rate that a version set."""
    args = next(v for v in versions if v.number == number).request.args
    assert args
    return args[-1]


async def _await_tried(context: DrillContext) -> None:
    """Wait until the requested version has been made and tried."""

    def tried(state: JobState) -> bool:
        requested = _requested(context, state)
        return requested is not None and requested.status is not VersionStatus.CHECKING

    await _until(context, tried, "the update was not tried")


async def _await_applied(context: DrillContext) -> None:
    """Wait until the version no longer waits and the job runs, or the job has ended."""

    def applied(state: JobState) -> bool:
        return bool(state.outcome) or (state.status == "running" and _waits(context, state) is False)

    await _until(context, applied, "the update was not applied")


def _requested(context: DrillContext, state: JobState) -> JobVersion | None:
    """Return the last requested version; None: the job does not have it yet."""
    folder = context.seen.update_folders[-1]
    return next((v for v in reversed(state.versions) if v.request.code == folder), None)


def _waits(context: DrillContext, state: JobState) -> bool | None:
    """Return whether the last requested version still waits; None: the job does not have it yet."""
    requested = _requested(context, state)
    return None if requested is None else requested.status in WAITS


async def _await_stop(context: DrillContext) -> None:
    """Wait until the open incident waits in its stop for the drill."""
    hold = context.planned.workers[0]
    plan = context.planned.worker_plan
    await context.until(lambda: faults.fired(plan, hold) is not None, TRIED_LIMIT_S, "no incident reached its stop")


async def _release_stop(context: DrillContext) -> None:
    """Let the incident continue its stop once the job has notified it of the version."""
    deadline = time.monotonic() + TRIED_LIMIT_S
    while not await _was_notified(context):
        if time.monotonic() >= deadline:
            raise ClusterError(f"the incident was not notified of the version within {TRIED_LIMIT_S:.0f} s")
        await asyncio.sleep(ASK_AGAIN_S)
    await asyncio.to_thread(Path(context.planned.workers[0]["until"]).touch)


async def _was_notified(context: DrillContext) -> bool:
    """Return whether the incident has the signal with the last requested version."""
    client, folder = context.cluster.control.client, context.seen.update_folders[-1]
    with suppress(RPCError):
        async for event in client.get_workflow_handle(
            incident_workflow_id(context.spec.name, 1)
        ).fetch_history_events():
            signaled = event.workflow_execution_signaled_event_attributes
            if signaled.signal_name == "versions":
                [versions] = await client.data_converter.decode(signaled.input.payloads, [list[JobVersion]])
                if any(v.request.code == folder and v.status is VersionStatus.PENDING for v in versions):
                    return True
    return False


async def _until(context: DrillContext, holds: Callable[[JobState], bool], problem: str) -> None:
    """Wait until a condition holds for the job's state.

    Raises:
        ClusterError: the job has ended, or the condition does not hold within the time limit.
    """
    deadline = time.monotonic() + TRIED_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(EverstepError):
            state = await context.cluster.control.state(context.spec.name)
            if holds(state):
                return
            if state.outcome:
                raise ClusterError(f"{problem}, and the job is over: {state.outcome}")
        await asyncio.sleep(POLL_S)
    raise ClusterError(f"{problem} within {TRIED_LIMIT_S:.0f} s")
