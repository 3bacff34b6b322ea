"""Gathers the facts after a drill from Temporal, the agents, the ledger and the processes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.agents.launch_ranks import LaunchRanks
from activities.agents.restore_checkpoints import RestoreCheckpoints
from drills.clusters.local import DrillCluster
from drills.judge.compare import Comparison
from drills.observe import step_records
from drills.observe.observed import DrillObservations
from drills.observe.step_records import Records
from everstep.decisions.act.recover.incident_state import IncidentState
from everstep.errors import TreeUnknown
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.job_state import incident_workflow_id
from everstep.model.machine import Machine
from everstep.model.state_copy import Restored, StateCopies, Tier
from everstep.model.version import JobVersion

WRITTEN_S = 20.0
"""A ledger that was away has all entries within this time after the job's end, seconds."""
SETTLE_S = 5.0
"""Processes that end by themselves after a job are gone within this time, seconds."""


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """The facts about one incident."""

    id: str
    opened_ns: int
    report: IncidentReport | None
    """The incident's report; None: the incident is still open."""
    seen_ns: int = 0
    """Time at which an agent or a watcher detected its fault, nanoseconds; 0: not known."""


OBSERVED = "observed"
"""Resolution of an incident that only reports a fault while the job continues."""


def is_observed(incident: IncidentFacts) -> bool:
    """Return whether an incident only reports a fault, while the job continues."""
    return incident.report is not None and incident.report.resolution == OBSERVED


@dataclass(slots=True)
class DrillFacts:
    """The facts about one drill, for the judge."""

    outcome: str = ""
    """``finished``, ``failed``, ``stopped``; empty: the job did not end in time."""
    headline: str = ""
    generations: int = 0
    parked: bool = False
    marks: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    incidents: list[IncidentFacts] = field(default_factory=list)
    records: Records = field(default_factory=Records)
    seen: DrillObservations = field(default_factory=DrillObservations)
    texts: list[str] = field(default_factory=list)
    """Texts of the incidents: headlines, stages, conclusions, and answers of eviction rules."""
    machine_events: list[str] = field(default_factory=list)
    """The texts of the ledger's events of the machine whose device broke, oldest first."""
    restored_from: dict[str, int] = field(default_factory=dict)
    """Tier → number of ranks that restored a copy from there, in the last restart."""
    comparison: Comparison | None = None
    """Comparison with the run without a fault; None: the job did not finish."""
    duplicates: int = 0
    shared: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Machines that had ranks of several jobs at the same time, each with these jobs."""
    samples: int = 0
    """Number of samples of the processes, which were taken to find two processes of one rank."""
    blind_s: float = 0.0
    """Longest time without a sample, seconds."""
    leaked: list[str] = field(default_factory=list)
    ettr: float | None = None
    ledger_lacks: list[str] = field(default_factory=list)
    """Entries that the ledger lacks at the end; checked only if it was away."""
    versions: list[JobVersion] = field(default_factory=list)
    """Versions of the job's code, as the job has them at the end."""
    launches_ns: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of the incidents' launches, nanoseconds."""


async def incidents(cluster: DrillCluster, job: str, number: int = 1) -> list[IncidentFacts]:
    """Return all incidents of a job from this number on, read from Temporal's histories, so that no worker has to
    answer."""
    found: list[IncidentFacts] = []
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
        opened_ns = int(described.start_time.timestamp() * 1e9)
        found.append(IncidentFacts(name, opened_ns, report, await seen_ns(cluster.control.client, name)))
        number += 1


async def seen_ns(client: Client, incident: str) -> int:
    """Return the time at which an incident's fault was detected, from the incident's input, nanoseconds; 0: not
    known."""
    async for event in client.get_workflow_handle(incident).fetch_history_events(page_size=1):
        payloads = event.workflow_execution_started_event_attributes.input.payloads
        [opened_with] = await client.data_converter.decode(payloads, [IncidentState])
        return int(opened_with.anomaly.seen_ns)
    return 0


async def launches(cluster: DrillCluster, incident: str) -> list[tuple[int, int]]:
    """Begin and end of the launches of an incident, nanoseconds."""
    started: dict[int, int] = {}
    found = []
    async for event in cluster.control.client.get_workflow_handle(incident).fetch_history_events():
        at = event.event_time.ToNanoseconds()
        if event.HasField("activity_task_scheduled_event_attributes"):
            if event.activity_task_scheduled_event_attributes.activity_type.name == LaunchRanks.name:
                started[event.event_id] = at
        elif event.HasField("activity_task_completed_event_attributes"):
            scheduled = event.activity_task_completed_event_attributes.scheduled_event_id
            if scheduled in started:
                found.append((started[scheduled], at))
    return found


async def texts(cluster: DrillCluster, incident: IncidentFacts) -> list[str]:
    """Return the texts of an incident: those of its report, and its full conclusions from the ledger."""
    found = [incident.report.headline, *incident.report.stages] if incident.report else []
    found += [answer.why for answer in incident.report.asked] if incident.report else []
    if ledger := await cluster.control.ledger():
        recorded = await asyncio.to_thread(ledger.incident, incident.id)
        found += [f"{event.stage}: {event.text}" for event in recorded.events] if recorded else []
    return found


async def moved(cluster: DrillCluster, incident: str) -> list[StateCopies]:
    """Return the copies that an incident moved to the machines that needed them, in order, read from its history."""
    scheduled: set[int] = set()
    found: list[StateCopies] = []
    handle = cluster.control.client.get_workflow_handle(incident)
    async for event in handle.fetch_history_events():
        if event.HasField("activity_task_scheduled_event_attributes"):
            if event.activity_task_scheduled_event_attributes.activity_type.name == RestoreCheckpoints.name:
                scheduled.add(event.event_id)
        elif event.HasField("activity_task_completed_event_attributes"):
            done = event.activity_task_completed_event_attributes
            if done.scheduled_event_id in scheduled:
                converter = cluster.control.client.data_converter
                [restored] = await converter.decode(done.result.payloads, [Restored])
                found += restored.moved
    return found


def restored_from(moved: Sequence[StateCopies], world_size: int, step: int) -> dict[str, int]:
    """Tier → number of ranks that restored a step from it. A copy that was not moved was in own memory."""
    tiers = {rank: copies.tier for copies in moved if copies.completed_steps == step for rank in copies.ranks}
    counts = Counter(str(tiers.get(rank, Tier.OWN)) for rank in range(world_size))
    return {str(tier): counts[tier] for tier in Tier if counts[tier]}


async def recorded_on(
    cluster: DrillCluster, spec: JobSpec, first_machines: Sequence[Machine], emptied: Collection[str]
) -> list[Machine]:
    """Return the machines with records of a job: its last machines, and its first machines that were not emptied."""
    last = {machine.name: machine for machine in (await cluster.control.state(spec.name)).machines}
    return [*last.values(), *(m for m in first_machines if m.name not in last and m.name not in emptied)]


async def left_behind(cluster: DrillCluster, spec: JobSpec, machines: Sequence[Machine]) -> list[str]:
    """Return the processes and shared memory that an ended job left, after waiting for those that end by themselves."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            left = await asyncio.to_thread(cluster.tree().left_of_jobs)
        except TreeUnknown as error:
            left = [f"unknown processes: {error}"]
        for machine in machines:
            folder = cluster.file.shm / machine.name / spec.name
            if folder.exists():
                left += [str(path) for path in (folder, *folder.rglob("*"))]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)


async def ettr(cluster: DrillCluster, job: str) -> float | None:
    """Return the productive share of the job's time, from the ledger; None: not known."""
    ledger = await cluster.control.ledger()
    share = await asyncio.to_thread(ledger.ettr, job, now_ns=time.time_ns()) if ledger else None
    return share.ratio if share else None


async def ledger_lacks(cluster: DrillCluster, job: str, incidents: Sequence[IncidentFacts]) -> list[str]:
    """Return the entries that the ledger lacks for an ended job, after waiting for late writes."""
    deadline = time.monotonic() + WRITTEN_S
    ledger = await cluster.control.ledger()
    if ledger is None:
        return ["any entry: it cannot be opened"]
    while True:
        jobs = await asyncio.to_thread(ledger.jobs)
        lacking = [] if any(record.name == job and record.ended_ns for record in jobs) else ["the end of the job"]
        for incident in incidents:
            found = await asyncio.to_thread(ledger.incident, incident.id)
            if found is None or not found.closed_ns:
                lacking.append(f"the end of {incident.id}")
        if not lacking or time.monotonic() > deadline:
            return lacking
        await asyncio.sleep(0.2)


async def records(
    cluster: DrillCluster, spec: JobSpec, machines: Sequence[Machine], rescued: Records | None = None
) -> tuple[Records, int]:
    """Return the step records of a job, and how often a rank had two processes according to the ranks' logs.

    Args:
        cluster: The cluster.
        spec: The job.
        machines: The machines with its records.
        rescued: Records that were read before a machine's disk was emptied; they are added to the result.
    """
    agents = cluster.control.agents
    topology = spec.topology()
    ranks = [topology.ranks(index) for index in range(spec.machines)]
    found = await step_records.collect(agents, spec.name, machines, rescued)
    return found, await step_records.read_logs(agents, spec.name, machines, ranks, found)
