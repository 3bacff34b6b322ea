"""What is known after a drill: gathered from Temporal, the agents, the ledger and /proc."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from console.drill import losses
from console.drill.cluster import DrillCluster
from console.drill.inject import Absorbed
from console.drill.losses import Records
from everstep.incident import IncidentReport
from everstep.job import JobSpec
from everstep.job_state import incident_workflow_id
from everstep.machine import Machine

SETTLE_S = 5.0
"""What ends by itself after a job has this long to be gone (ours)."""


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """One incident."""

    id: str
    opened_ns: int
    report: IncidentReport | None
    """None while it is open."""
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Facts:
    """Everything that the judge looks at."""

    outcome: str = ""
    """``finished``, ``failed``, ``stopped``; empty: the job did not end in time."""
    headline: str = ""
    generations: int = 0
    parked: bool = False
    marks: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    incidents: list[IncidentFacts] = field(default_factory=list)
    records: Records = field(default_factory=Records)
    absorbed: Absorbed | None = None
    differences: list[str] | None = None
    duplicates: int = 0
    leaked: list[str] = field(default_factory=list)
    ettr: float | None = None
    launches_ns: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of the launches of the incidents."""


async def incidents(cluster: DrillCluster, job: str) -> list[IncidentFacts]:
    """All incidents of a job, from Temporal alone: no worker need answer."""
    found: list[IncidentFacts] = []
    number = 1
    while True:
        name = incident_workflow_id(job, number)
        handle = cluster.control.client.get_workflow_handle(name, result_type=IncidentReport)
        try:
            described = await handle.describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return found
            raise
        report = await handle.result() if described.status is WorkflowExecutionStatus.COMPLETED else None
        found.append(IncidentFacts(name, int(described.start_time.timestamp() * 1e9), report))
        number += 1


async def launches(cluster: DrillCluster, incident: str) -> list[tuple[int, int]]:
    """Begin and end (ns) of the launches of an incident."""
    started: dict[int, int] = {}
    found = []
    async for event in cluster.control.client.get_workflow_handle(incident).fetch_history_events():
        at = event.event_time.ToNanoseconds()
        if event.HasField("activity_task_scheduled_event_attributes"):
            if event.activity_task_scheduled_event_attributes.activity_type.name == "Launch ranks":
                started[event.event_id] = at
        elif event.HasField("activity_task_completed_event_attributes"):
            scheduled = event.activity_task_completed_event_attributes.scheduled_event_id
            if scheduled in started:
                found.append((started[scheduled], at))
    return found


async def left_behind(cluster: DrillCluster, spec: JobSpec, machines: Sequence[Machine]) -> list[str]:
    """Processes and shared memory of a job that has ended, once what ends by itself had its time."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = await asyncio.to_thread(cluster.tree().left_of_jobs)
        for machine in machines:
            folder = cluster.file.shm / machine.name / spec.name
            if folder.exists():
                left += [str(path) for path in (folder, *folder.rglob("*"))]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)


async def ettr(cluster: DrillCluster, job: str) -> float | None:
    """Productive share of the job's time, from the ledger."""
    ledger = await cluster.control.ledger()
    found = await asyncio.to_thread(ledger.ettr, job, now_ns=time.time_ns()) if ledger else None
    return found.ratio if found else None


async def records(cluster: DrillCluster, spec: JobSpec, machines: Sequence[Machine]) -> tuple[Records, int]:
    """The step records of a job, and how many launches of a rank its logs show too many."""
    agents = cluster.control.agents
    topology = spec.topology()
    ranks = [topology.ranks(index) for index in range(spec.machines)]
    return (
        await losses.collect(agents, spec.name, machines),
        await losses.launches(agents, spec.name, machines, ranks),
    )
