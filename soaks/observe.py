"""Observes a job at a gate from outside: processes, files, histories, and the answer of ``everstep status``."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from temporalio.api.enums.v1 import EventType, WorkflowTaskFailedCause
from temporalio.api.history.v1 import HistoryEvent

from controlplane.local import mounts
from controlplane.queries.status import JobReport, job_report
from drills.clusters.local import DrillCluster
from drills.clusters.network import LEDGER
from drills.inject.context import SETTLE_LIMIT_S, DrillContext
from drills.judge.compare import Comparison
from drills.judge.facts import IncidentFacts
from drills.spec.loss import best_step
from everstep.errors import ClusterError, EverstepError
from everstep.model.job import JobSpec
from everstep.model.job_state import job_workflow_id
from everstep.model.version import JobVersion
from everstep.system import procfs
from everstep.system.procfs import is_alive
from soaks.machines import MachinesSeen

_RANK = re.compile(r"everstep r\d+")
_STORE = re.compile(r"everstep s\d+")
SHM = Path("/dev/shm")
FREED_S = 5.0
"""A semaphore that no process holds counts as left if it still exists after this time, seconds."""
ALIGNED_S = 5.0
"""Longest wait for the backup of the last step, seconds, after machines were behind: they then back up only named steps
(ADR 0015), and the job may wait between two of these."""
_SHARED = re.compile(r"sem\.|psm_|torch_|nccl-")
"""Matches the names of Python's semaphores and shared memory, of torch's shared tensors and of NCCL's buffers."""
_NUMBERS = re.compile(r"(?<=^report-)(\d+)-\d+$|[0-9a-f]{8}[0-9a-f-]*")


@dataclass(frozen=True, slots=True)
class ClusterProcess:
    """A process of the cluster."""

    pid: int
    name: str
    """Name of a part of the cluster (``agent-m1``, ``worker-0``, ``temporal``, …), or its kind: ``rank``, ``store``,
    ``fork server``, ``of the ledger``, ``gone`` or ``unknown: …``."""
    memory_mb: float
    """Memory that it does not share, MB."""
    descriptors: int


@dataclass(slots=True)
class GateObservations:
    """The observations at one gate."""

    step: int
    """The step of the gate."""
    processes: list[ClusterProcess] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    """Path of a file in the machines' shared memory, without numbers of generations → number of such files."""
    unheld: set[str] = field(default_factory=set)
    """Semaphores and buffers in /dev/shm that no process holds."""
    newest: int = 0
    """The newest step of which any rank has a copy in its memory."""
    backed_up: int = 0
    """The newest step of which every rank with a peer has a backup."""
    missing_copies: str = ""
    """The copies of the gate's step that are missing, in words; empty: none."""
    disk_folders: int = 0
    """Number of checkpoints on disk."""
    mounts: list[str] = field(default_factory=list)
    """Mounts in the cluster's folders."""
    report: JobReport | None = None
    silent: str = ""
    """Why ``report`` is not known; empty: it is known."""
    history_events: int = 0
    """Number of events in the history of the job's workflow."""
    incidents: list[IncidentFacts] = field(default_factory=list)
    """The incidents since the last gate."""
    failed_tasks: list[str] = field(default_factory=list)
    """Failed workflow tasks of these incidents, with the reasons."""
    generation: int = 0
    """The newest generation in which a rank reported a step."""
    redone: int | None = None
    """The largest number of a rank's reports since the last gate that repeat a step; None: there are no reports."""
    unreported: list[str] = field(default_factory=list)
    """Parts that did not come back, and problems of copies that were not reported."""
    versions: list[JobVersion] = field(default_factory=list)
    """Versions of the job's code, according to the job."""
    other_versions: list[str] = field(default_factory=list)
    """Problems with the versions in the step records since the last gate."""
    comparison: Comparison | None = None
    """Comparison of the losses since the last gate with those of a run without faults; None: not known."""
    copies: int = 0
    """Number of ranks that had two processes at once since the last gate."""
    blind_s: float = 0.0
    """Longest time since the last gate without a sample of the processes, seconds."""
    shared: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Machines that had ranks of several jobs at the same time since the last gate, each with these jobs."""
    machines: MachinesSeen = field(default_factory=MachinesSeen)
    """The machines according to the pool, the jobs and the agents."""
    other_ranks: int = 0
    """Number of ranks of the second job."""
    other: list[str] = field(default_factory=list)
    """Problems of the second job."""


async def observe(
    context: DrillContext, step: int, *, late: int = 0, unheld_before: Collection[str] = ()
) -> GateObservations:
    """Observe a job that waits at a gate. The caller adds the observations since the last gate.

    Args:
        context: Context of one of the job's faults.
        step: The step of the gate.
        late: Number of steps that may be missing on disks and at peers, since a machine was behind.
        unheld_before: Semaphores and buffers that no process held before.
    """
    seen = GateObservations(step)
    try:
        seen.backed_up = await _await_copies(context, step, late)
    except ClusterError as error:
        seen.missing_copies = str(error)
    seen.newest = await asyncio.to_thread(context.stored.newest)
    seen.processes = await asyncio.to_thread(processes, context.cluster)
    seen.files = await asyncio.to_thread(files, context.cluster.file.shm)
    seen.unheld = await _unheld(unheld_before)
    disk = Path(context.spec.checkpoint.disk_path) / context.spec.name
    seen.disk_folders = len(list(await asyncio.to_thread(lambda: list(disk.glob("step-*")))))
    mounted = mounts.below(context.cluster.file.shm) + mounts.below(context.cluster.home)
    seen.mounts = [str(path) for path in mounted]
    try:
        seen.report = await job_report(context.cluster.control, context.spec.name)
    except EverstepError as error:
        seen.silent = str(error)
    seen.history_events = await _history_events(context.cluster, context.spec)
    return seen


async def _await_copies(context: DrillContext, step: int, late: int) -> int:
    """Wait until the copies of a step are where they belong; returns the newest step with all backups.

    Raises:
        ClusterError: copies are missing after the time limits.
    """
    stored, ranks = context.stored, range(context.spec.topology().world_size)
    every = context.spec.checkpoint.disk_every_steps
    await context.await_saves(step, disk=step - step % every if every and not late else None)
    await context.until(
        lambda: best_step({rank: stored.disk_steps(rank) for rank in ranks}) >= step - every - late,
        SETTLE_LIMIT_S,
        f"no step after {step - every - late} is on all disks",
    )
    backed = [rank for rank in ranks if stored.backup(rank)]
    # A rank that is behind skips every second step, but not the last one before the job waits.
    try:
        await context.until(
            lambda: all(step in stored.backup_steps(rank) for rank in backed),
            ALIGNED_S if late else SETTLE_LIMIT_S,
            f"step {step} was not backed up",
        )
    except ClusterError:
        complete = best_step({rank: stored.own_steps(rank) & stored.backup_steps(rank) for rank in backed})
        if not late or complete < step - late:
            raise
        return complete
    return step


async def _history_events(cluster: DrillCluster, spec: JobSpec) -> int:
    handle = cluster.control.client.get_workflow_handle(job_workflow_id(spec.name))
    return (await handle.describe()).history_length


async def failed_tasks(cluster: DrillCluster, workflow_id: str) -> list[str]:
    """Return the failed workflow tasks of a workflow, each of which is a defect of its code."""
    handle = cluster.control.client.get_workflow_handle(workflow_id)
    return [
        f"{workflow_id}, event {event.event_id}: {event.workflow_task_failed_event_attributes.failure.message}"
        async for event in handle.fetch_history_events()
        if is_failed_task(event)
    ]


def is_failed_task(event: HistoryEvent) -> bool:
    """Return whether an event means that a workflow's code failed.

    A task also fails if a signal arrives while it is about to end its workflow (*unhandled command*). The server then
    repeats the task, and nothing is lost.
    """
    if event.event_type != EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED:
        return False
    cause = event.workflow_task_failed_event_attributes.cause
    return cause != WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND


def processes(cluster: DrillCluster) -> list[ClusterProcess]:
    """Return the live processes of the cluster, with their names or kinds.

    Raises:
        TreeUnknown: there is no supervisor.
    """
    named = {pid: name for name, pid in cluster.processes().items()}
    tree = cluster.tree()
    named[tree.root] = "supervisor"
    found = []
    for process in tree.processes():
        if not is_alive(process.pid, process.start):
            continue
        server = named.get(process.parent) == LEDGER  # this server forks a process for each connection
        name = "of the ledger" if server else named.get(process.pid) or _kind(process.pid, process.name)
        found.append(
            ClusterProcess(process.pid, name, procfs.anonymous_bytes(process.pid) / 2**20, descriptors(process.pid))
        )
    return found


def _kind(pid: int, name: str) -> str:
    if _RANK.fullmatch(name):
        return "rank"
    if _STORE.fullmatch(name):
        return "store"
    with suppress(psutil.Error):
        command = " ".join(psutil.Process(pid).cmdline())
        if "fork_server.py" in command:
            return "fork server"
        return f"unknown: {command[:100]}"
    return "gone"


def descriptors(pid: int) -> int:
    """Return the number of a process's descriptors, without its connections to itself.

    Temporal's Web UI opens such connections for each page that a person opens, and keeps them.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        connections = [c for c in process.net_connections("tcp") if c.raddr]
        own = {c.laddr for c in connections}
        return int(process.num_fds()) - sum(c.raddr in own for c in connections)
    return 0


def files(shm: Path) -> dict[str, int]:
    """Return the path of a file in the machines' shared memory, without generations and identifiers → number of such
    files."""
    counts: dict[str, int] = {}
    for folder, _, names in os.walk(shm):
        for name in names:
            path = Path(folder).relative_to(shm) / _NUMBERS.sub(lambda match: match[1] or "*", name)
            counts[str(path)] = counts.get(str(path), 0) + 1
    return counts


async def _unheld(before: Collection[str]) -> set[str]:
    """Return the semaphores and buffers that no process holds. New ones count only if they are not freed soon by other
    programs."""
    found = await asyncio.to_thread(unheld)
    if found - set(before):
        await asyncio.sleep(FREED_S)
        found &= await asyncio.to_thread(unheld)
    return found


def unheld(folder: Path = SHM) -> set[str]:
    """Return the names of this user's semaphores and buffers in a folder that no process has open or mapped."""
    found = {entry for entry in _shared(folder) if not _is_held(entry)}
    return found & _shared(folder)  # without those that were freed meanwhile


def _shared(folder: Path) -> set[str]:
    names = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if _SHARED.match(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    names.add(entry.path)
    return names


def _is_held(path: str) -> bool:
    return any(procfs.has_mapped(pid, Path(path)) or path in procfs.open_files(pid).values() for pid in procfs.pids())


def by_name(processes: list[ClusterProcess]) -> Mapping[str, list[ClusterProcess]]:
    """Return the processes, grouped by name."""
    groups: dict[str, list[ClusterProcess]] = {}
    for process in processes:
        groups.setdefault(process.name, []).append(process)
    return groups
