"""Injecting a fault: plans for ranks and workers, a SIGKILL from outside for agents and fork servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console.drill.catalogue import CONTROL_FAULTS, MACHINE_FAULTS, CannotInject
from console.drill.cluster import DrillCluster
from console.drill.copies import await_rank_of, children
from console.drill.request import DrillRequest
from everstep import faults
from everstep.errors import AgentError, ClusterError
from everstep.job import JobSpec
from everstep.machine import Machine

Fault = dict[str, Any]

LOOK_S = 0.02
BACK_LIMIT_S = 60.0
"""A killed part must be back within this long (ours)."""
LAUNCH_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Planned:
    """The faults of one drill and the files that say so."""

    plan: Path
    """For ranks; the injector's own marks lie beside it."""
    ranks: list[Fault]
    outside: list[Fault]
    """Done by the injector itself."""
    worker_plan: Path
    workers: list[Fault]
    holds: list[Fault] = field(default_factory=list)
    """Where the job waits for the injector."""

    def write(self) -> None:
        """Write the plans, whole or not at all: ranks and workers read them at any time."""
        for path, content in ((self.plan, [*self.ranks, *self.holds]), (self.worker_plan, self.workers)):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(content))
            temporary.rename(path)

    def let_go(self) -> None:
        """Let the job go on."""
        for hold in self.holds:
            Path(hold["until"]).touch()

    def fired(self) -> dict[str, dict[str, Any] | None]:
        """Fault id → when and where it fired, or None."""
        marks = {fault["id"]: faults.fired(self.plan, fault) for fault in (*self.ranks, *self.outside)}
        return marks | {fault["id"]: faults.fired(self.worker_plan, fault) for fault in self.workers}


def planned(request: DrillRequest, spec: JobSpec, plan: Path, cluster: DrillCluster) -> Planned:
    """The plan of a drill.

    Raises:
        CannotInject: the part to be killed is not ours.
    """
    ranks: list[Fault] = []
    if request.base not in MACHINE_FAULTS:
        ranks = rank_faults(request, request.struck_ranks(spec))
    outside: list[Fault] = []
    if request.fault in MACHINE_FAULTS:
        outside.append({"id": request.fault, "fault": request.fault, "machine": request.struck_machine(spec)})
    workers: list[Fault] = []
    if request.fault in CONTROL_FAULTS:
        fault: Fault = {"id": f"{request.fault}-{spec.name}", "fault": request.fault, "job": spec.name}
        if request.at_event is not None:
            fault["at_event"] = request.at_event
        else:
            fault |= {"in_stage": request.in_stage, "moment": request.moment}
        if request.fault == "kill-temporal":
            if "temporal" not in cluster.processes():
                raise CannotInject(f"kill-temporal: the server at {cluster.file.temporal_address} is not ours to kill")
            fault["pid"] = cluster.processes()["temporal"]
        workers.append(fault)
    holds: list[Fault] = []
    if request.absorbed:
        hold: Fault = {"id": "hold", "fault": "hold", "rank": 0, "at_step": request.hold_step}
        holds.append(hold | {"until": f"{plan}.go"})
    return Planned(plan, ranks, outside, cluster.worker_plan, workers, holds)


def rank_faults(request: DrillRequest, ranks: list[int]) -> list[Fault]:
    """The faults that ranks act out, in the order in which they come."""
    found: list[Fault] = []
    for again in range(request.times):
        together = [f"f{again}-{rank}" for rank in ranks]
        for rank, name in zip(ranks, together, strict=True):
            fault: Fault = {"id": name, "fault": request.base, "rank": rank, "at_step": request.at_step}
            fault["point"] = "save" if request.base == "kill-during-save" else "step"
            if len(ranks) > 1:
                fault["together"] = together
            match request.base:
                case "kill-rank":
                    fault["signal"] = request.signal
                case "exit-rank":
                    fault["code"] = request.code
                case "raise":
                    fault["exception"] = request.exception
            found.append(fault)
    return found


@dataclass(frozen=True, slots=True)
class Absorbed:
    """A part beside the ranks was killed and came back."""

    killed_ns: int
    back_ns: int | None


async def kill_part(
    cluster: DrillCluster, request: DrillRequest, spec: JobSpec, machines: list[Machine], given: Planned
) -> Absorbed:
    """Kill an agent or a fork server once the job has come to the step; wait until it is back."""
    machine = next(one for one in machines if one.name == request.struck_machine(spec))
    if request.during == "launch":
        return await _kill_in_launch(cluster, spec, machine, given)
    await _reach(cluster, spec, machines, request.at_step)
    is_agent = request.fault == "kill-agent"
    before = cluster.processes()[f"agent-{machine.name}"] if is_agent else await _fork_server(cluster, spec, machine)
    killed_ns = _kill(given, before)
    try:
        return Absorbed(killed_ns, await _back(cluster, spec, machine, before, is_agent=is_agent))
    finally:
        given.let_go()


async def _kill_in_launch(cluster: DrillCluster, spec: JobSpec, machine: Machine, given: Planned) -> Absorbed:
    """Kill the agent as soon as its fork server forked the first rank of the next generation."""
    await _reach(cluster, spec, [machine], 1)
    fork_server = await _fork_server(cluster, spec, machine)
    known = set(children(fork_server))
    while faults.fired(given.plan, given.ranks[0]) is None:  # noqa: ASYNC110 - another process says so, by a file
        await asyncio.sleep(LOOK_S)
    agent = cluster.processes()[f"agent-{machine.name}"]
    forked = await asyncio.to_thread(await_rank_of, fork_server, known, LAUNCH_LIMIT_S)
    if forked is None:
        raise ClusterError(f"no rank was launched on {machine.name} within {LAUNCH_LIMIT_S:.0f} s")
    killed_ns = _kill(given, agent)
    return Absorbed(killed_ns, await _back(cluster, spec, machine, agent, is_agent=True))


def _kill(given: Planned, pid: int) -> int:
    faults.claim(given.plan, given.outside[0], victim=pid)
    os.kill(pid, signal.SIGKILL)
    return time.time_ns()


async def _reach(cluster: DrillCluster, spec: JobSpec, machines: list[Machine], step: int) -> None:
    """Wait until all ranks have completed so many steps."""
    async with cluster.control.feed(spec.name, machines, LOOK_S) as feed:
        async for picture in feed.pictures():
            if picture.step is not None and picture.step >= step:
                return


async def _fork_server(cluster: DrillCluster, spec: JobSpec, machine: Machine) -> int:
    """Pid of the job's fork server on a machine; 0: none."""
    described = await cluster.control.agents.get(machine.address).describe()
    return next((one.fork_server_pid for one in described.jobs if one.job == spec.name), 0)


async def _back(cluster: DrillCluster, spec: JobSpec, machine: Machine, before: int, *, is_agent: bool) -> int | None:
    """When an agent answers again, or a fork server is ready again; None when it is not within the limit."""
    deadline = time.monotonic() + BACK_LIMIT_S
    while time.monotonic() < deadline:
        try:
            described = await cluster.control.agents.get(machine.address).describe(timeout_s=1.0)
        except AgentError:
            await asyncio.sleep(LOOK_S)
            continue
        job = next((one for one in described.jobs if one.job == spec.name), None)
        if not is_agent and job is None:
            return None  # the job is over: it needs none any more
        now = described.pid if is_agent else job.fork_server_pid if job else 0
        if now not in (0, before):
            return time.time_ns()
        await asyncio.sleep(LOOK_S)
    return None
