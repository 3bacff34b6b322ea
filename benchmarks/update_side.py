"""Runs a job under everstep, updates its code and kills its ranks again and again, and measures each restart."""

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
POLL_S = 0.05
BETWEEN_STEPS = 5
"""Number of steps between two restarts, after which all costs of a start are over."""
PAUSE_S = 3600.0
POLICY = RecoveryPolicy(
    rollback={"steps": 0, "within_s": 0.0},
    retry={"max_failures_at_step": 20},
    progress={"steady_steps": 3, "steady_s": 0.0},
    ladder={"restarts": 0, "repeats": 0},
    hang={"stopped_s": PAUSE_S, "idle_floor_s": PAUSE_S, "floor_s": PAUSE_S},
)
"""The job's policy: killed ranks neither make a version suspect nor park the job, and a paused job does not count as
hanging."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A restart, by an update or a recovery."""

    request_s: float
    """Time from the request or the kill to the first step of all ranks after it."""
    downtime_s: float
    """Time from the last step of any rank before the restart to the first step of all ranks after it."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Part of an update (``benchmarks/update_parts.py``), or stage of a recovery → seconds."""


class UpdateSide(EverstepSide):
    """A cluster with a job that is updated."""

    @asynccontextmanager
    async def job(self, script: Path, args: Sequence[str]) -> AsyncIterator[UpdatedJob]:
        """Run a job that steps; it is stopped after the block."""
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
        """Send new code to all machines."""
        return await ship(self._control.agents, self._control.machines, megabytes=megabytes)


class UpdatedJob:
    """A running job whose code is updated.

    Args:
        side: The cluster.
        spec: The job as it was started.
        script: The script from which its versions are made.
    """

    def __init__(self, side: UpdateSide, spec: JobSpec, script: Path) -> None:
        self._control, self._folder = side._control, side._folder
        self._spec, self._script = spec, script
        self._versions = 1
        self._generation = 1

    async def update(self, env: Mapping[str, str] | None = None) -> Switch:
        """Measure an urgent update to the same code with another comment, and with other variables if given."""
        await self._await_steps()
        began_ns = time.time_ns()
        await self._ask(Urgency.URGENT, env)
        return await self._switched(began_ns, update=True)

    async def kill(self, rank: int, *, lazy: bool) -> Switch:
        """Measure the recovery from a killed rank, with or without a lazy update."""
        await self._await_steps()
        if lazy:
            await self._ask(Urgency.LAZY)
            await self._until(lambda state: self._newest(state).status is VersionStatus.PENDING)
        began_ns = await self._kill(rank)
        return await self._switched(began_ns, update=False)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Stop the ranks by a signal while the block runs."""
        pids = await self._pids()
        try:
            for pid in pids.values():
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGCONT)

    async def _pids(self) -> dict[int, int]:
        """Rank → pid."""
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

    async def _await_steps(self) -> None:
        """Wait until the job has made some steps since the last restart."""
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
            await asyncio.sleep(POLL_S)

    @staticmethod
    def _newest(state: JobState) -> JobVersion:
        return state.versions[-1]


def _first(found: Sequence[ReportedStep], generation: int) -> int:
    """Return the time at which a rank reported its first step of a generation, nanoseconds.

    Raises:
        ClusterError: the rank reported no step.
    """
    times = [record.time_ns for record in found if record.generation == generation]
    if not times:
        raise ClusterError(f"a rank reported no step of generation {generation}")
    return min(times)


def _write(script: Path, folder: Path, number: int) -> None:
    """Write the script to a folder, with another comment at its end."""
    folder.mkdir(parents=True)
    shutil.copy2(script, folder)
    with (folder / script.name).open("a") as file:
        file.write(f"\n# version {number}\n")
