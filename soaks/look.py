"""What a soak sees from outside while the job stands at a gate: processes, files, histories, and what status says."""

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
"""A semaphore that nobody holds is left when it is still there after this long."""
ALIGNED_S = 5.0
"""Machines that were behind back up named steps together (ADR 0015): where a job stands still between two of them, the
last step is waited for no longer than this."""
_SHARED = re.compile(r"sem\.|psm_|torch_|nccl-")
"""Names that Python's semaphores and shared memory, torch's tensors between processes and NCCL's buffers begin with."""
_NUMBERS = re.compile(r"(?<=^report-)(\d+)-\d+$|[0-9a-f]{8}[0-9a-f-]*")


@dataclass(frozen=True, slots=True)
class ClusterProcess:
    """One process of the cluster."""

    pid: int
    name: str
    """``agent-m1``, ``worker-0``, ``temporal``, …, ``rank``, ``store``, ``fork server``, ``of the ledger`` or
    ``unknown: …``."""
    memory_mb: float
    """Memory of its own, without what it shares."""
    descriptors: int


@dataclass(slots=True)
class GateLook:
    """All that was seen at one gate."""

    step: int
    """The step of the gate."""
    processes: list[ClusterProcess] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    """In the machines' shared memory, without the number of the generation → how many of that name."""
    unheld: set[str] = field(default_factory=set)
    """Semaphores and buffers in /dev/shm that no process holds."""
    newest: int = 0
    """The newest step that any rank's memory holds."""
    backed_up: int = 0
    """The newest step that every rank with a backup has there as well."""
    unsettled: str = ""
    """Why not every copy of that step is where it belongs; empty: all are."""
    disk_folders: int = 0
    """Checkpoints on disk."""
    mounts: list[str] = field(default_factory=list)
    report: JobReport | None = None
    silent: str = ""
    """Why the job's state is not known; empty: it is."""
    history_events: int = 0
    """Length of the history of the job's workflow."""
    incidents: list[IncidentFacts] = field(default_factory=list)
    """Since the gate before."""
    failed_tasks: list[str] = field(default_factory=list)
    """Workflow tasks of those incidents that failed, with the reason."""
    generation: int = 0
    """The newest that a rank reported a step of."""
    redone: int | None = None
    """Most steps that any rank reported more than once since the gate before; None: nobody reported any."""
    untold: list[str] = field(default_factory=list)
    """Parts that did not come back, and what happened to copies and was not told."""
    versions: list[JobVersion] = field(default_factory=list)
    """Versions of the job's code, as the job has them."""
    other_versions: list[str] = field(default_factory=list)
    """Steps since the gate before whose record names another version than the job says ran."""
    comparison: Comparison | None = None
    """Comparison of the losses since the last gate; None: not known."""
    copies: int = 0
    """Ranks of which two copies were seen since the gate before."""
    blind_s: float = 0.0
    """Longest time since then in which nobody looked for copies."""
    shared: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Machines that had ranks of several jobs at the same time since then, and these jobs."""
    machines: MachinesSeen = field(default_factory=MachinesSeen)
    """The machines according to the pool, the jobs and the agents."""
    beside: int = 0
    """Ranks of the second job."""
    other: list[str] = field(default_factory=list)
    """Problems of the second job."""


async def look(context: DrillContext, step: int, *, late: int = 0, unheld_before: Collection[str] = ()) -> GateLook:
    """Look at a job that stands at a gate; incidents, losses and copies are the caller's to add.

    Args:
        context: Of a fault of the job.
        step: At which it stands.
        late: Number of steps that may be missing on disks and at peers, since a machine was behind.
        unheld_before: Semaphores and buffers that nobody held before.
    """
    seen = GateLook(step)
    try:
        seen.backed_up = await _settle(context, step, late)
    except ClusterError as error:
        seen.unsettled = str(error)
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


async def _settle(context: DrillContext, step: int, late: int) -> int:
    stored, ranks = context.stored, range(context.spec.topology().world_size)
    every = context.spec.checkpoint.disk_every_steps
    await context.await_saves(step, disk=step - step % every if every and not late else None)
    await context.until(
        lambda: best_step({rank: stored.disk_steps(rank) for rank in ranks}) >= step - every - late,
        SETTLE_LIMIT_S,
        f"no step after {step - every - late} is on all disks",
    )
    backed = [rank for rank in ranks if stored.backup(rank)]
    # Not settled otherwise: who is behind sends every other step, but the last one of a job that stands still.
    try:
        await context.until(
            lambda: all(step in stored.backup_steps(rank) for rank in backed),
            ALIGNED_S if late else SETTLE_LIMIT_S,
            f"step {step} was not backed up",
        )
    except ClusterError:
        whole = best_step({rank: stored.own_steps(rank) & stored.backup_steps(rank) for rank in backed})
        if not late or whole < step - late:
            raise
        return whole
    return step


async def _history_events(cluster: DrillCluster, spec: JobSpec) -> int:
    handle = cluster.control.client.get_workflow_handle(job_workflow_id(spec.name))
    return (await handle.describe()).history_length


async def failed_tasks(cluster: DrillCluster, workflow_id: str) -> list[str]:
    """Workflow tasks of a workflow that failed: that is a fault of its code, whoever died meanwhile."""
    handle = cluster.control.client.get_workflow_handle(workflow_id)
    return [
        f"{workflow_id}, event {event.event_id}: {event.workflow_task_failed_event_attributes.failure.message}"
        async for event in handle.fetch_history_events()
        if task_failed(event)
    ]


def task_failed(event: HistoryEvent) -> bool:
    """Whether an event says that a workflow's code failed.

    A task also fails where something came while it was about to end its workflow
    (*unhandled command*): the server has it look again, and nothing is lost.
    """
    if event.event_type != EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED:
        return False
    cause = event.workflow_task_failed_event_attributes.cause
    return cause != WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND


def processes(cluster: DrillCluster) -> list[ClusterProcess]:
    """All that lives below the cluster's supervisor, by what it is.

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
        server = named.get(process.parent) == LEDGER  # it forks a process for each connection
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
    """How many a process holds, without connections to itself: Temporal's Web UI opens some to its own server, and
    keeps them, for each page that a person looks at."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        connections = [c for c in process.net_connections("tcp") if c.raddr]
        own = {c.laddr for c in connections}
        return int(process.num_fds()) - sum(c.raddr in own for c in connections)
    return 0


def files(shm: Path) -> dict[str, int]:
    """Files in the machines' shared memory, named without generations and identifiers: how many of each name."""
    counts: dict[str, int] = {}
    for folder, _, names in os.walk(shm):
        for name in names:
            path = Path(folder).relative_to(shm) / _NUMBERS.sub(lambda found: found[1] or "*", name)
            counts[str(path)] = counts.get(str(path), 0) + 1
    return counts


async def _unheld(before: Collection[str]) -> set[str]:
    """Files that no process holds; new ones that are soon freed do not count: other programs make semaphores too."""
    found = await asyncio.to_thread(unheld)
    if found - set(before):
        await asyncio.sleep(FREED_S)
        found &= await asyncio.to_thread(unheld)
    return found


def unheld(folder: Path = SHM) -> set[str]:
    """Names of this user's semaphores and buffers in a folder that no process has open or mapped: nobody frees them."""
    found = {entry for entry in _shared(folder) if not _is_held(entry)}
    return found & _shared(folder)  # what was freed meanwhile is not left


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


def census(found: list[ClusterProcess]) -> Mapping[str, list[ClusterProcess]]:
    """The processes, grouped by name."""
    by_name: dict[str, list[ClusterProcess]] = {}
    for process in found:
        by_name.setdefault(process.name, []).append(process)
    return by_name
