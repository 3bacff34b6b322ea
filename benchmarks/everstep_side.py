"""Runs recoveries under everstep on a local cluster, and measures the parts of each."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from activities.agents.launch_ranks import LaunchRanks
from activities.agents.stop_ranks import StopRanks
from benchmarks.common import say
from benchmarks.peers.torchrun import fault_time, write_plan
from benchmarks.timeline import PARTS, Recovery, parts_between
from controlplane.client import Control
from controlplane.local import cluster as local
from controlplane.local import cluster_processes
from controlplane.local.cluster_file import ClusterFile
from controlplane.local.power import powered_off, state_folder
from controlplane.queries.status import job_report
from controlplane.start_checks.code import start_recorded
from drills.judge.facts import seen_ns
from everstep.errors import ClusterError
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import incident_workflow_id
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.rank import environment

LIMIT_S = 120.0
NAME = "bench"


@dataclass(frozen=True, slots=True)
class Times:
    """Times at which the activities of an incident were scheduled and completed, nanoseconds."""

    scheduled: dict[str, int]
    completed: dict[str, int]


class EverstepSide:
    """A local cluster in a temporary folder; an async context manager."""

    def __init__(self, *, machines: int, standbys: int = 0, at_most: int = 0) -> None:
        """Set the sizes of the cluster.

        Args:
            machines: Number of machines of the job.
            standbys: Number of machines that are kept for replacement.
            at_most: Number of machines to which the cluster may grow; 0: it does not grow.
        """
        self._machines, self._standbys, self._at_most = machines, standbys, at_most
        self._count = 0

    async def __aenter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
        self._before = os.environ.get("EVERSTEP_HOME")
        os.environ["EVERSTEP_HOME"] = str(self._folder)
        try:
            await asyncio.to_thread(
                local.up,
                NAME,
                machines=self._machines,
                standbys=self._standbys,
                at_most=self._at_most,
                progress=say,
            )
            self._control = await Control.connect(NAME)
        except BaseException:
            await self._down()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._control.__aexit__(kind, error, trace)
        await self._down()

    async def _down(self) -> None:
        try:
            await asyncio.to_thread(local.down, NAME)
        finally:
            if self._before is None:
                os.environ.pop("EVERSTEP_HOME", None)
            else:
                os.environ["EVERSTEP_HOME"] = self._before
            shutil.rmtree(self._folder, ignore_errors=True)

    async def recover(self, script: Path, args: Sequence[str], *, rank: int, at_step: int) -> Recovery:
        """Kill one rank in the middle of a step, and wait for the end of the incident.

        Raises:
            ClusterError: the job did not recover within the time limit.
        """
        self._count += 1
        name = f"bench-{self._count}"
        plan = write_plan(self._folder / name, rank, at_step)
        spec = JobSpec(
            name=name,
            script=str(script),
            args=list(args),
            machines=self._machines,
            ranks_per_machine=2,
            tp=2,
            pp=2,
            env={environment.FAULTS: str(plan)},
        )
        await start_recorded(self._control, spec, self._control.machines)
        try:
            report, times = await self._incident(name)
        finally:
            await self._control.stop(name, "measured")
            await self._control.result(name)
        seen = await seen_ns(self._control.client, incident_workflow_id(name, 1))
        return recovery_of(rank, at_step, report, times, fault_ns=fault_time(plan), seen_ns=seen)

    async def lose(self, script: Path, args: Sequence[str], *, machines: Sequence[str], at_step: int) -> float:
        """Cut the power of machines for good while a job steps on them, with one rank on each machine.

        Returns:
            Seconds until all ranks have completed a step again, on other machines.

        Raises:
            ClusterError: the job did not recover within the time limit.
        """
        self._count += 1
        name = f"bench-{self._count}"
        policy = RecoveryPolicy(evict={"at_least": len(machines)})  # that many evictions need no operator
        spec = JobSpec(
            name=name,
            script=str(script),
            args=list(args),
            machines=self._machines,
            ranks_per_machine=1,
            policy=policy,
        )
        await start_recorded(self._control, spec, self._control.machines[: self._machines])
        cluster = ClusterFile.load(NAME)
        try:
            await self._at_step(name, at_step)
            off = powered_off(cluster, machines)
            killed_ns = await asyncio.to_thread(off.__enter__)
            try:
                report, _ = await self._incident(name)
            finally:
                off.__exit__(None, None, None)
        finally:
            await self._control.stop(name, "measured")
            await self._control.result(name)
        assert report.confirmation is not None
        return (report.confirmation.stepped_ns - killed_ns) / 1e9

    async def _at_step(self, job: str, step: int) -> None:
        """Wait until all ranks have completed a step."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while ((await job_report(self._control, job)).step or 0) < step:  # noqa: ASYNC110 - queried over the network
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise ClusterError(f"{job} did not reach step {step} within {LIMIT_S:.0f} s") from None

    def idle_share(self, machine: str, seconds: float) -> float:
        """Return the share of a core that an idle machine uses, measured for this many seconds."""
        cluster = ClusterFile.load(NAME)
        folders = (state_folder(cluster, machine), cluster.shm / machine)
        processes = [psutil.Process(pid) for pid in cluster_processes.of_machine(cluster.id, machine, *folders)]
        before, began = sum(map(_cpu_s, processes)), time.monotonic()
        time.sleep(seconds)
        return (sum(map(_cpu_s, processes)) - before) / (time.monotonic() - began)

    async def _incident(self, job: str) -> tuple[IncidentReport, Times]:
        """Wait for the end of the job's first incident; returns its report and the times of its activities."""
        from temporalio.service import RPCError

        handle = self._control.client.get_workflow_handle(incident_workflow_id(job, 1), result_type=IncidentReport)
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        report = await handle.result()
                        break
                    except RPCError:  # it has not begun yet
                        await asyncio.sleep(0.2)
        except TimeoutError:
            raise ClusterError(f"{job} did not recover within {LIMIT_S:.0f} s: see {self._folder}") from None
        if not report.recovered or report.confirmation is None:
            raise ClusterError(f"{job} did not recover: {report.headline}")
        scheduled: dict[str, int] = {}
        completed: dict[str, int] = {}
        types: dict[int, str] = {}
        async for event in handle.fetch_history_events():
            at = event.event_time.ToNanoseconds()
            if event.HasField("activity_task_scheduled_event_attributes"):
                kind = event.activity_task_scheduled_event_attributes.activity_type.name
                types[event.event_id] = kind
                scheduled.setdefault(kind, at)
            elif event.HasField("activity_task_completed_event_attributes"):
                completed.setdefault(types[event.activity_task_completed_event_attributes.scheduled_event_id], at)
        return report, Times(scheduled, completed)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def recovery_of(
    rank: int, at_step: int, report: IncidentReport, times: Times, *, fault_ns: int, seen_ns: int
) -> Recovery:
    """Return a recovery with its parts, from the mark of the fault, the report of the incident, and the history."""
    assert report.confirmation is not None
    total_s = (report.confirmation.stepped_ns - fault_ns) / 1e9
    within = report.confirmation.parts
    forked_ns = report.confirmation.stepped_ns - int(sum(within.values()) * 1e9)
    ends = {
        "detect": seen_ns,
        "report": times.scheduled[StopRanks.name],
        "stop": times.completed[StopRanks.name],
        "decide": times.scheduled[LaunchRanks.name],
        "launch": forked_ns,
    }
    at = forked_ns
    for name in PARTS[len(ends) :]:
        at += int(within.get(name, 0.0) * 1e9)
        ends[name] = at
    return Recovery(rank, at_step, total_s, parts_between(total_s, fault_ns, [(name, ends[name]) for name in PARTS]))
