"""Updates of a job's code, each requested by the same signal three times: good code, and code that fails."""

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
from typing import Any, Literal

from pydantic import Field
from temporalio.service import RPCError, RPCStatusCode

from drills.faults.away import ForSeconds, down, workers
from drills.faults.fault import Fault
from drills.faults.kill_rank import KillRank
from drills.inject import new_code
from drills.inject.context import LOOK_S, DrillContext
from drills.judge.facts import DrillFacts
from drills.judge.versions import steps_under_their_versions
from drills.observe.observed import Absorbed
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
"""States of a job in which an update may be requested, besides faults: parked, or in another update."""
WHILE = {
    "kill-rank": "the job recovers from the loss of a rank",
    PARKED: "the job is parked",
    AGAIN: "another update is applied",
    "kill-workers": "no worker lives",
    "kill-temporal": "Temporal is down",
    "kill-agent": "an agent is down",
}
"""States of the job in which an update may be requested → the state as text."""
RATE, OTHER_RATE = 1e-3, 4e-3
"""Learning rates of the example that updates set: steps with them have other losses."""
LR_FROM = "--lr-from"
"""The example's option for learning rates."""
SIGNALS = 3
"""The same signal is sent this many times; the update is applied once."""
TRIED_LIMIT_S = 120.0
"""A version has been tried within this time, even if a part is away meanwhile, seconds."""
ASK_AGAIN_S = 0.2
RIDES: tuple[dict[str, Any], ...] = (
    {"lazy": True, "then": "kill-rank"},
    {"lazy": True, "then": "kill-machine"},
    {"lazy": True, "then": "kill-forkserver"},
    {"lazy": True, "window": 2.0},
)
"""Options of lazy updates in a soak: the fault whose recovery applies them, or a window."""
FAILS_AFTER = (0, 1, 2)
"""Steps after which a bad version fails in a soak: before the next gate."""


@dataclass(frozen=True, slots=True)
class ExpectedUpdate:
    """The expected result of an update, and its cost."""

    incidents: int
    generations: int
    resolution: str
    """Resolution of the last incident."""
    versions: tuple[VersionStatus, ...]
    """Final status of the job's versions, in order."""


class UpdateFault(OnRanks, OnMachine, ForSeconds, Fault):
    """An update of the job's code: urgent, or lazy, to be applied by a recovery."""

    is_update = True
    steps_done_anew = True

    lazy: bool = Field(False, description="With the fault of --then, or after --window.")
    window: float = Field(
        0.0, ge=0, description="With --lazy: forced after so many seconds.", json_schema_extra={"metavar": "S"}
    )
    then: Literal["", "kill-rank", "kill-machine", "kill-forkserver"] = Field(
        "", description="With --lazy: the fault that it rides on."
    )
    gone: bool = Field(False, description="With --then kill-machine: the machine does not come back.")
    neutral: bool = Field(False, json_schema_extra=NOT_ON_THE_COMMAND_LINE)
    """The update changes no loss, for a job that is compared with one without updates."""

    @property
    def requested_during(self) -> str:
        """The state of the job when the update is requested; empty: it steps."""
        return ""

    @property
    def expected(self) -> ExpectedUpdate:
        """The expected result of the update."""
        raise NotImplementedError

    @property
    def lines(self) -> str:
        """The lines that are put into the script."""
        return ""

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a lazy update that nothing applies, or that has two causes to be applied."""
        super().refuse(drill, spec)
        if self.lazy != bool(self.then or self.window) or (self.then and self.window):
            raise ConfigError(
                "a lazy update rides on --then FAULT, or is forced after --window S: --lazy takes one of them"
            )
        if self.lazy and self.requested_during:
            raise ConfigError(f"--during {self.requested_during} goes with an urgent update, without --lazy")

    def what(self) -> str:
        """The new code, as text."""
        raise NotImplementedError

    def describe(self, spec: JobSpec) -> str:
        """The new code, and when it is applied."""
        when = f"forced after {self.window:g} s" if self.window else "lazy" if self.lazy else "urgent"
        during = f", requested while {WHILE[self.requested_during]}" if self.requested_during else ""
        return f"an update ({when}) to {self.what()}{during}"

    @property
    def marks(self) -> tuple[str, ...]:
        """The request, and the fault that applies a lazy update."""
        strikes = self.then or self.requested_during == "kill-rank"
        return (self.name, STRIKE) if strikes else (self.name,)

    @property
    def follows(self) -> str:
        """The fault whose recovery applies a lazy update."""
        return self.then

    @property
    def stays_away(self) -> bool:
        return self.gone

    def loss(self, spec: JobSpec) -> Loss:
        """The loss whose recovery applies a lazy update; for a fork server, its ranks die with it."""
        if self.then == "kill-machine":
            return Loss((self.machine_index(spec),))
        kills = self.requested_during == "kill-rank" or self.then in ("kill-rank", "kill-forkserver")
        return Loss(ranks=tuple(self.struck_ranks(spec))) if kills else Loss()

    @property
    def patience(self) -> dict[str, Any]:
        """A policy for a job that waits at a step until the update was tried."""
        return settings.GONE_PATIENT if self.gone else settings.PATIENT_POLICY

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        """Checkpoints on disk, if a machine is lost."""
        return settings.disk_settings(disk) if self.then == "kill-machine" else {}

    @property
    def parked_for_a_while(self) -> bool:
        """Yes, if the update is requested while the job is parked."""
        return self.requested_during == PARKED

    @property
    def stages(self) -> Sequence[str]:
        """All ranks end the same step before the stop."""
        return ("align", *STAGES)

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
        """A machine that does not come back."""
        return [f"m{index}" for index in self.loss(spec).machines] if self.gone else []

    # Injection.

    async def strike(self, context: DrillContext) -> None:
        """Request the update, and wait until the job may continue: it must not end before it was updated."""
        if self.requested_during == PARKED:
            await _until(context, lambda state: state.status == "parked", "the job was not parked")
        else:
            await context.reach(context.request.at_step)
        match self.requested_during:
            case "kill-rank":
                await context.second_fault(exact=False)
                await _stopping(context)
                await self._request_and_try(context, 0)
                await _let_stop(context)
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
            case other:
                await self._request_and_try(context, 0)
                if other == AGAIN:
                    context.planned.let_go()
                    await _stopping(context)
                    await self._request_and_try(context, 1)
                    await _let_stop(context)
        await _tried(context)
        await self._ride(context)
        context.planned.let_go()
        await _settled(context)

    async def _ride(self, context: DrillContext) -> None:
        """Inject the fault whose recovery applies the update, or wait until the window ends."""
        if self.then:
            if self.then == "kill-forkserver" and (server := await context.fork_server(context.target)):
                os.kill(server, signal.SIGKILL)
            await context.second_fault(exact=False)
        elif self.window:
            await _until(
                context, lambda state: state.status != "running" or _waits(context, state) is False, "not forced"
            )

    async def _request_and_try(self, context: DrillContext, number: int) -> None:
        await self._request(context, number)
        await _tried(context)

    async def _request(self, context: DrillContext, number: int) -> None:
        """Write the code, and send the signal as often as the drill needs; retry until Temporal accepts it."""
        spec = context.spec
        folder = context.planned.plan.with_name(f"{context.planned.plan.name}.code-{number}")
        note = f"update {number + 1} of {context.planned.plan}"
        await asyncio.to_thread(new_code.write, spec, folder, self.lines, note)
        request = self.request_of(spec, folder, number)
        handle = context.cluster.control.client.get_workflow_handle(job_workflow_id(spec.name))
        context.mark(self.name)
        context.seen.asked.append(str(folder))
        for _ in range(SIGNALS):
            while True:
                try:
                    await handle.signal("update", request)
                    break
                except RPCError as error:
                    if error.status is RPCStatusCode.NOT_FOUND:
                        raise ClusterError(f"{spec.name} is over: nothing accepts the update") from error
                    await asyncio.sleep(ASK_AGAIN_S)

    def request_of(self, spec: JobSpec, folder: Path, number: int) -> dict[str, Any]:
        """The argument of the signal.

        Args:
            spec: The job as it was started.
            folder: The folder of the code.
            number: Number of the drill's update, from 0 on.
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
        """Add the final versions of the job."""
        facts.versions = (await context.cluster.control.state(context.spec.name)).versions

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """The update must have its expected result, and each step must have run under the recorded version."""
        expected, versions = self.expected, facts.versions
        found = [f"{one.name} ran {len(one.ranges)} times" for one in versions[1:] if len(one.ranges) > 1]
        became = tuple(one.status for one in versions)
        if became != expected.versions:
            are = ", ".join(f"v{one.number} {one.status} ({one.why[:100]})" for one in versions)
            found.append(f"the versions are {are}, and should be {', '.join(expected.versions)}")
        if expected.resolution and (not reports or reports[-1].resolution != expected.resolution):
            resolution = reports[-1].resolution if reports else "nothing"
            found.append(f"the last incident's resolution is {resolution}, and should be {expected.resolution}")
        if expected.resolution == "rollback":
            # A reader first needs the operator who requested it.
            suspect = [one for one in versions if one.number > 1]
            nameless = [one for one in suspect if "by drill" not in one.why]
            found += [f"nobody says who asked for {one.name}: {one.why}" for one in nameless]
            texts = " ".join(text for report in reports for text in (report.headline, *report.stages))
            found += [] if "v2, asked for by drill" in texts else ["the incident does not name the suspect"]
        return found + steps_under_their_versions(versions, facts.records)


class Update(UpdateFault):
    """Good code."""

    name = "update"
    summary = "a hot update of the code, requested three times by the same signal"

    during: Literal["", "kill-rank", "parked", "update", "kill-workers", "kill-temporal", "kill-agent"] = Field(
        "", description="In the middle of what it is requested."
    )

    @property
    def requested_during(self) -> str:
        return self.during

    @property
    def expected(self) -> ExpectedUpdate:
        """One incident that applies the update, with the fault that it meets."""
        running, replaced = VersionStatus.RUNNING, VersionStatus.REPLACED
        if self.during == PARKED:
            tries = RecoveryPolicy().retry.max_failures_at_step
            return ExpectedUpdate(1, tries + 1, "update", (replaced, running))
        if self.during == AGAIN:
            return ExpectedUpdate(1, 2, "update", (replaced, VersionStatus.SUPERSEDED, running))
        return ExpectedUpdate(1, 2, "eviction" if self.gone else "update", (replaced, running))

    def what(self) -> str:
        """Another learning rate of the example."""
        return "other learning rates" if self.during == AGAIN else "another learning rate"

    def rank_entries(self, at_step: int, spec: JobSpec, plan: Path) -> list[Entry]:
        """Entries for a job that is to be parked: a rank dies again and again."""
        if self.during != PARKED:
            return []
        kills = KillRank(ranks=self.struck_ranks(spec), times=RecoveryPolicy().retry.max_failures_at_step)
        return kills.rank_entries(at_step, spec, plan)

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """A hold: the incident under way waits in its stop for the drill."""
        if self.during not in ("kill-rank", AGAIN):
            return []
        place = {"job": spec.name, "in_stage": "stop", "moment": "middle"}
        return [{"id": f"stop-{spec.name}", "fault": "hold", **place, "until": f"{plan}.tried"}]

    def request_of(self, spec: JobSpec, folder: Path, number: int) -> dict[str, Any]:
        """The request, with another learning rate if the script is the example."""
        request = super().request_of(spec, folder, number)
        if self._changes_losses(spec):
            request["args"] = [*spec.args, LR_FROM, "0", str((RATE, OTHER_RATE)[number])]
        return request

    def _changes_losses(self, spec: JobSpec) -> bool:
        return not self.neutral and Path(spec.script) == example("gpt.py")

    def reference(self, spec: JobSpec, versions: Sequence[JobVersion]) -> JobSpec:
        """A job whose script makes the same changes itself, at the steps of the updates."""
        if not self._changes_losses(spec):
            return spec
        applied = sorted(one.ranges[-1] + (one.number,) for one in versions if one.number > 1 and one.ranges)
        changes = [word for _, begin, _, number in applied for word in (LR_FROM, str(begin), _rate(versions, number))]
        return spec.model_copy(update={"args": [*spec.args, *changes]})

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw urgent and lazy updates equally often; a lazy one waits for a recovery or a window."""
        return rng.choice(({}, {"during": "kill-workers"}, {"during": "kill-agent"}, *RIDES)) if alone else {}


class BadVersion(UpdateFault):
    """Code that fails."""

    name = "bad-version"
    summary = "a hot update whose code fails: at its import, after some steps, or in its restore"

    at_start: bool = Field(False, description="It fails at its import.")
    fails_after: int = Field(1, ge=0, description="Steps after which it fails.", json_schema_extra={"metavar": "N"})
    changes_state: bool = Field(False, description="It has a parameter that the state lacks.")

    @property
    def expected(self) -> ExpectedUpdate:
        """It is refused or rolled back; before its first step, the incident that applied it rolls it back."""
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

    def what(self) -> str:
        if self.at_start:
            return "code that cannot be imported"
        if self.changes_state:
            return "code with one parameter more"
        return f"code that fails after {self.fails_after} steps"

    async def _ride(self, context: DrillContext) -> None:
        if not self.at_start:
            await super()._ride(context)
            return
        mark = context.fired(self.name)
        assert mark is not None
        context.seen.absorbed = Absorbed(int(str(mark["time_ns"])), time.time_ns())

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        fails_after = ({"fails_after": steps} for steps in FAILS_AFTER)
        return rng.choice(({"at_start": True}, {"changes_state": True}, *fails_after))


def _rate(versions: Sequence[JobVersion], number: int) -> str:
    """The learning rate that a version set."""
    asked = next(one for one in versions if one.number == number).request.args
    assert asked
    return asked[-1]


async def _tried(context: DrillContext) -> None:
    """Wait until the requested version has been made and tried."""

    def tried(state: JobState) -> bool:
        asked = _asked(context, state)
        return asked is not None and asked.status is not VersionStatus.CHECKING

    await _until(context, tried, "the update was not tried")


async def _settled(context: DrillContext) -> None:
    """Wait until the job runs and the version no longer waits, or the job has ended."""

    def settled(state: JobState) -> bool:
        return bool(state.outcome) or (state.status == "running" and _waits(context, state) is False)

    await _until(context, settled, "the update was not applied")


def _asked(context: DrillContext, state: JobState) -> JobVersion | None:
    """The last requested version; None: the job does not have it."""
    folder = context.seen.asked[-1]
    return next((one for one in reversed(state.versions) if one.request.code == folder), None)


def _waits(context: DrillContext, state: JobState) -> bool | None:
    """Whether the last requested version still waits; None: the job does not have it."""
    asked = _asked(context, state)
    return None if asked is None else asked.status in WAITS


async def _stopping(context: DrillContext) -> None:
    """Wait until the open incident waits in its stop for the drill."""
    hold = context.planned.workers[0]
    plan = context.planned.worker_plan
    await context.until(lambda: faults.fired(plan, hold) is not None, TRIED_LIMIT_S, "no incident came to its stop")


async def _let_stop(context: DrillContext) -> None:
    """Let the incident continue once the job has notified it of the version, so that it applies it."""
    deadline = time.monotonic() + TRIED_LIMIT_S
    while not await _has_heard(context):
        if time.monotonic() >= deadline:
            raise ClusterError(f"the incident heard of no version within {TRIED_LIMIT_S:.0f} s")
        await asyncio.sleep(ASK_AGAIN_S)
    await asyncio.to_thread(Path(context.planned.workers[0]["until"]).touch)


async def _has_heard(context: DrillContext) -> bool:
    client, folder = context.cluster.control.client, context.seen.asked[-1]
    with suppress(RPCError):
        async for event in client.get_workflow_handle(
            incident_workflow_id(context.spec.name, 1)
        ).fetch_history_events():
            said = event.workflow_execution_signaled_event_attributes
            if said.signal_name == "versions":
                [versions] = await client.data_converter.decode(said.input.payloads, [list[JobVersion]])
                if any(one.request.code == folder and one.status is VersionStatus.PENDING for one in versions):
                    return True
    return False


async def _until(context: DrillContext, holds: Callable[[JobState], bool], what: str) -> None:
    deadline = time.monotonic() + TRIED_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(EverstepError):
            state = await context.cluster.control.state(context.spec.name)
            if holds(state):
                return
            if state.outcome:
                raise ClusterError(f"{what}: the job is over, {state.outcome}")
        await asyncio.sleep(LOOK_S)
    raise ClusterError(f"{what} within {TRIED_LIMIT_S:.0f} s")
