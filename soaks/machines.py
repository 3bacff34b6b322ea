"""Asks the pool, the jobs and the agents which job has which machine, and compares their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.machine_pool import pool_state
from drills.clusters.local import DrillCluster
from drills.inject.put_back import OUT_OF_USE
from everstep.errors import AgentError, EverstepError
from everstep.model.machine import Machine
from everstep.model.pool import PoolPlace, PoolState

SETTLE_S = 15.0
"""The pool, the jobs and the agents agree within this time, seconds; a killed worker may have to start first."""
POLL_S = 0.2


@dataclass(slots=True)
class MachinesSeen:
    """The state of the machines according to the pool, the jobs and the agents."""

    listed: list[str] = field(default_factory=list)
    """All machines of the cluster."""
    pool: dict[str, str] = field(default_factory=dict)
    """Machine → the job that has it; if no job has it, its place in the pool, such as ``standby``."""
    jobs: dict[str, list[str]] = field(default_factory=dict)
    """Job → its machines, according to the job's workflow."""
    ranks: dict[str, list[str]] = field(default_factory=dict)
    """Machine → the jobs with live ranks on it, according to its agent; silent machines are missing."""
    unknown: str = ""
    """Why the pool or the jobs are not known; empty: they are known."""


def leased_twice(seen: MachinesSeen) -> list[str]:
    """Return problems with machines that two jobs have, or that have ranks of a job that does not lease them. Pure."""
    found = [f"{machine} has ranks of {' and '.join(jobs)}" for machine, jobs in seen.ranks.items() if len(jobs) > 1]
    holders: dict[str, list[str]] = {}
    for job, machines in seen.jobs.items():
        for machine in machines:
            holders.setdefault(machine, []).append(job)
    found += [f"{' and '.join(jobs)} both have {machine}" for machine, jobs in holders.items() if len(jobs) > 1]
    for machine, jobs in seen.ranks.items():
        owner = seen.pool.get(machine, "not in the pool")
        found += [f"{machine} has ranks of {job}, and is {owner}" for job in jobs if job != owner]
    return found


def lost(seen: MachinesSeen, out: Sequence[str]) -> list[str]:
    """Return problems with machines that are out of use without a fault, or of which pool and jobs report different
    things. Pure.

    Args:
        seen: The state of the machines.
        out: Machines that left a job and are not released yet.
    """
    found = [f"the pool does not know {machine}" for machine in seen.listed if machine not in seen.pool]
    idle = {PoolPlace.STANDBY, PoolPlace.FREE}
    for machine, owner in seen.pool.items():
        if owner in OUT_OF_USE and machine not in out:
            found.append(f"{machine} is {owner}, and nothing is wrong with it")
        elif owner not in {*idle, *OUT_OF_USE, *seen.jobs}:
            found.append(f"{machine} is {owner}")
    for job, machines in seen.jobs.items():
        kept = sorted(machine for machine, owner in seen.pool.items() if owner == job)
        if kept != sorted(machines):
            found.append(f"{job} runs on {', '.join(sorted(machines))}, and the pool leases it {', '.join(kept)}")
    return found


async def machines_seen(cluster: DrillCluster, jobs: Sequence[str], out: Sequence[str]) -> MachinesSeen:
    """Ask the pool, the jobs and the agents; while they do not agree, ask again until the time limit.

    Args:
        cluster: The cluster.
        jobs: Names of the jobs that run.
        out: Machines that left a job and are not released yet.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        seen = await _ask_once(cluster, jobs)
        wrong = seen.unknown or leased_twice(seen) or lost(seen, out)
        if not wrong or time.monotonic() > deadline:
            return seen
        await asyncio.sleep(POLL_S)


async def _ask_once(cluster: DrillCluster, jobs: Sequence[str]) -> MachinesSeen:
    machines = list(cluster.file.machines)
    seen = MachinesSeen(listed=[machine.name for machine in machines])
    pool = await pool_state(cluster.control)
    if pool is None:
        seen.unknown = "the pool does not answer"
        return seen
    seen.pool = _owners(pool)
    try:
        for job in jobs:
            seen.jobs[job] = [machine.name for machine in (await cluster.control.state(job)).machines]
    except EverstepError as error:
        seen.unknown = str(error)
        return seen
    on_machines = await asyncio.gather(*(_jobs_on(cluster, machine) for machine in machines))
    seen.ranks = {
        machine.name: found for machine, found in zip(machines, on_machines, strict=True) if found is not None
    }
    return seen


def _owners(pool: PoolState) -> dict[str, str]:
    return {
        name: entry.job if entry.place is PoolPlace.ACTIVE else str(entry.place.value)
        for name, entry in pool.machines.items()
    }


async def _jobs_on(cluster: DrillCluster, machine: Machine) -> list[str] | None:
    """Return the jobs with live ranks on a machine; None: its agent does not answer."""
    try:
        described = await cluster.control.agents.get(machine.address).describe(timeout_s=2.0)
    except AgentError:
        return None
    return [job.job for job in described.jobs if any(rank.alive for rank in job.ranks)]
