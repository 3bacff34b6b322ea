"""A job under everstep whose code is updated again and again, and whose ranks are killed in between."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.everstep_side import EverstepSide
from benchmarks.update_parts import Seen, parts_of
from benchmarks.update_ship import Shipped, ship
from controlplane.start_checks.code import start_recorded
from controlplane.versions import ask_update
from drills.observe import step_records
from drills.observe.step_records import ReportedStep
from everstep.errors import ClusterError
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, job_workflow_id
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import JobVersion, UpdateRequest, Urgency, VersionStatus

LIMIT_S = 180.0
LOOK_S = 0.05
BETWEEN_STEPS = 5
"""Steps that a job does between two restarts: every start-up cost is over."""
PAUSE_S = 3600.0
POLICY = RecoveryPolicy(
    rollback={"steps": 0, "within_s": 0.0},
    retry={"max_failures_at_step": 20},
    progress={"steady_steps": 3, "steady_s": 0.0},
    ladder={"restarts": 0, "repeats": 0},
    hang={"stopped_s": PAUSE_S, "idle_floor_s": PAUSE_S, "floor_s": PAUSE_S},
)
"""Nothing that is killed here is held against a version, and it is no reason to park the job; ranks that stand still
while it is another side's turn do not hang."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One restart: an update, or a recovery."""

    request_s: float
    """From the request, or the kill, to the first step of all ranks after it."""
    downtime_s: float
    """From the last step of any rank before to the first step of all ranks after."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds: of an update by part (``benchmarks/update_parts.py``), of a recovery by stage."""


class UpdateSide(EverstepSide):
    """A cluster with a job that is updated."""

    @asynccontextmanager
    async def job(self, script: Path, args: Sequence[str]) -> AsyncIterator[UpdatedJob]:
        """A job that steps, stopped at the end."""
        self._count += 1
        sizes = {"machines": self._machines, "ranks_per_machine": 2, "tp": 2, "pp": 2}
        name = f"bench-{self._count}"
        spec = JobSpec.model_validate({"name": name, "script": str(script), "args": list(args), **sizes})
        spec = spec.model_copy(update={"policy": POLICY})
        await start_recorded(self._control, spec, self._control.machines)
        try:
            await self._at_step(name, BETWEEN_STEPS)
            yield UpdatedJob(self, spec, script)
        finally:
            await self._control.stop(name, "measured")
            await self._control.result(name)

    async def ship(self, megabytes: float) -> Shipped:
        """Bring code that no machine has to all of them."""
        return await ship(self._control.agents, self._control.machines, megabytes=megabytes)


class UpdatedJob:
    """The job, while it runs.

    Args:
        side: Where.
        spec: As it was started.
        script: What its versions are made from.
    """

    def __init__(self, side: UpdateSide, spec: JobSpec, script: Path) -> None:
        self._control, self._folder = side._control, side._folder
        self._spec, self._script = spec, script
        self._versions = 1
        self._generation = 1

    async def update(self, env: Mapping[str, str] | None = None) -> Switch:
        """An urgent update, to the same code with another comment, and perhaps other variables."""
        await self._steps_on()
        began_ns = time.time_ns()
        await self._ask(Urgency.URGENT, env)
        return await self._switched(began_ns, update=True)

    async def kill(self, rank: int, *, lazy: bool) -> Switch:
        """The death of a rank, on which an update rides or not."""
        await self._steps_on()
        if lazy:
            await self._ask(Urgency.LAZY)
            await self._until(lambda state: self._newest(state).status is VersionStatus.PENDING)
        began_ns = await self._kill(rank)
        return await self._switched(began_ns, update=False)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """While this lasts its ranks stand still, stopped by a signal, and leave the computer to others."""
        pids = await self._pids()
        try:
            for pid in pids.values():
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGCONT)

    async def _pids(self) -> dict[int, int]:
        """Rank → process, of all ranks that live."""
        async with self._control.feed(self._spec.name, self._control.machines) as feed:
            async for picture in feed.pictures():
                if len(picture.ranks) == self._spec.topology().world_size:
                    return {rank: view.pid for rank, view in picture.ranks.items()}
        raise AssertionError

    async def _ask(self, urgency: Urgency, env: Mapping[str, str] | None = None) -> None:
        self._versions += 1
        folder = self._folder / f"code-{self._versions}"
        await asyncio.to_thread(_write, self._script, folder, self._versions)
        request = UpdateRequest(operator="benchmark", code=str(folder), urgency=urgency, env=dict(env) if env else None)
        await ask_update(self._control, self._spec.name, request)

    async def _kill(self, rank: int) -> int:
        pid = (await self._pids())[rank]
        killed_ns = time.time_ns()
        os.kill(pid, signal.SIGKILL)
        return killed_ns

    async def _switched(self, began_ns: int, *, update: bool) -> Switch:
        before_it = self._generation
        state = await self._until(lambda state: state.generation > before_it and state.status == "running")
        self._generation = state.generation
        if self._newest(state).status is not VersionStatus.RUNNING or state.generation != before_it + 1:
            newest = self._newest(state)
            raise ClusterError(f"{newest.name} is {newest.status}, generation {state.generation}: {newest.why}")
        records = await step_records.collect(self._control.agents, self._spec.name, self._control.machines)
        if records.unknown:
            raise ClusterError(records.unknown[0])
        before = max(one.time_ns for found in records.of.values() for one in found if one.generation < self._generation)
        after = max(_first(found, self._generation) for found in records.of.values())
        seconds = (after - began_ns) / 1e9
        client, last = self._control.client, state.incidents[-1]
        handle = client.get_workflow_handle(last.id, result_type=IncidentReport)
        report = await handle.result()
        if update:
            job = await Seen.of(client.get_workflow_handle(job_workflow_id(self._spec.name)), since_ns=began_ns)
            incident = await Seen.of(client.get_workflow_handle(last.id), since_ns=began_ns)
            assert report.confirmation is not None  # it stepped
            parts = parts_of(began_ns, seconds, job, incident, report.confirmation)
        else:
            parts = {stage.name: stage.seconds for stage in report.timings}
        return Switch(seconds, (after - before) / 1e9, parts)

    async def _steps_on(self) -> None:
        """Until the job runs, and has done some steps since the last restart."""
        self._generation = (await self._until(lambda state: state.status == "running")).generation
        first = -1
        try:
            async with (
                asyncio.timeout(LIMIT_S),
                self._control.feed(self._spec.name, self._control.machines) as feed,
            ):
                async for picture in feed.pictures():
                    if picture.step is None or picture.generation < self._generation:
                        continue
                    first = picture.step if first < 0 else first
                    if picture.step >= first + BETWEEN_STEPS:
                        return
        except TimeoutError:
            text = f"{self._spec.name} does not step in generation {self._generation} (first seen: {first})"
            raise ClusterError(text) from None

    async def _until(self, holds: Callable[[JobState], bool]) -> JobState:
        deadline = time.monotonic() + LIMIT_S
        while True:
            state = await self._control.state(self._spec.name)
            if holds(state):
                return state
            if self._newest(state).status in {VersionStatus.REFUSED, VersionStatus.SUSPECT}:
                raise ClusterError(f"{self._newest(state).name}: {self._newest(state).why}")
            if state.outcome or time.monotonic() > deadline:
                raise ClusterError(f"{self._spec.name} does not step again: {state.outcome or 'not in time'}")
            await asyncio.sleep(LOOK_S)

    @staticmethod
    def _newest(state: JobState) -> JobVersion:
        return state.versions[-1]


def _first(found: Sequence[ReportedStep], generation: int) -> int:
    """When a rank reported its first step of a generation, ns.

    Raises:
        ClusterError: it reported none.
    """
    times = [one.time_ns for one in found if one.generation == generation]
    if not times:
        raise ClusterError(f"a rank reported no step of generation {generation}")
    return min(times)


def _write(script: Path, folder: Path, number: int) -> None:
    """The script, with another comment at its end."""
    folder.mkdir(parents=True)
    shutil.copy2(script, folder)
    with (folder / script.name).open("a") as file:
        file.write(f"\n# version {number}\n")
