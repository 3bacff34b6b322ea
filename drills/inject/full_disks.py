"""File systems of a machine that are too small: for its own checkpoints, for others' backups, for its disk."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from controlplane.local import cluster_processes, mounts, power, readiness
from drills.inject.context import SETTLE_LIMIT_S, DrillContext
from drills.inject.found import await_finding, await_told
from everstep.errors import ClusterError
from everstep.slots.format import own_slots

AMPLE = 4 << 30
"""Room at the beginning, bytes; a memory file system takes only what is used."""
REPORTS = 300_000
"""Of the step reports of one rank and generation, bytes: 4096 records of 64 bytes, and some more."""
GENERATIONS = 3
"""Whose reports may lie there at once: parking takes some attempts."""
SPARE = 64 << 10
DISK_SPARE = 16 << 10
"""Less than the share of a disk that its inspection calls full, also where a checkpoint is small."""
START_LIMIT_S = 60.0
SAID_LIMIT_S = 20.0
"""A problem with backups or disks is told within this long."""


@contextmanager
def small_room(context: DrillContext) -> Iterator[None]:
    """Put a file system of its own under what is going to be full, before the job starts; nothing for other faults."""
    match context.request.base:
        case "shm-full":
            size = AMPLE
            if context.request.parks:
                size = SPARE + REPORTS * GENERATIONS * context.spec.ranks_per_machine
            with _small_memory(context, size):
                if context.request.parks:
                    context.mark("shm-full", bytes=size)
                yield
        case "disk-full":
            with mounts.small(disk_of(context), AMPLE):
                yield
        case _:
            yield


@contextmanager
def _small_memory(context: DrillContext, size: int) -> Iterator[None]:
    """A machine with another shared memory: its agent and fork servers keep files there, and start anew on it."""
    target, cluster = context.target, context.cluster.file
    with ExitStack() as mounted:
        with power.powered_off(cluster, [target.name]):
            mounted.enter_context(mounts.small(memory_of(context), size))
        try:
            readiness.agent_serves(cluster, target.name, target.address)
            yield
        finally:
            with power.powered_off(cluster, [target.name]):
                mounted.close()
            readiness.agent_serves(cluster, target.name, target.address)


def memory_of(context: DrillContext) -> Path:
    """Shared memory of the struck machine."""
    return context.cluster.file.shm / context.target.name


def disk_of(context: DrillContext) -> Path:
    """Where the struck machine keeps checkpoints on its disk."""
    return power.state_folder(context.cluster.file, context.target.name) / "checkpoints"


async def fill_memory(context: DrillContext) -> None:
    """Let the machine's own slots be all that its shared memory has room for; then kill who needs the backups there."""
    if context.request.parks:
        return  # it was too small from the beginning
    agent = cluster_processes.identify(context.agent(context.target))
    if agent is None:
        raise ClusterError(f"the agent of {context.target.name} is gone")
    ranks = context.spec.topology().ranks(context.machines.index(context.target))
    reports = [memory_of(context) / context.spec.name / f"report-{rank}-1" for rank in ranks]
    await context.until(
        lambda: all(path.exists() for path in reports),
        START_LIMIT_S,
        f"the ranks of {context.target.name} were not started",
    )
    cluster_processes.send(agent, signal.SIGSTOP)  # before their first save, so that no backup gets in before
    try:
        slots = [own_slots(memory_of(context) / context.spec.name, rank) for rank in ranks]
        await context.until(
            lambda: all(map(context.stored.own_steps, ranks)) and all(map(_allocated, slots)),
            START_LIMIT_S,
            "nothing was saved, or not all slots were allocated",
        )
        # The next generation's reports still fit, as they do where a machine is only nearly full; a backup does not.
        mounts.shrink(memory_of(context), SPARE + REPORTS * len(ranks))
        context.mark("shm-full")
    finally:
        cluster_processes.send(agent, signal.SIGCONT)
    step = await context.held_up()
    await context.listen(SAID_LIMIT_S, enough=lambda: bool(context.seen.said))
    every = context.spec.checkpoint.disk_every_steps
    await context.settled(step, backups=False, disk=step - step % every)
    await context.second_fault(exact=True)


def _allocated(path: Path) -> bool:
    """Whether a checkpoint file has memory for all of its slots; the rank sees to it after its first save."""
    found = path.stat()
    return found.st_blocks * 512 >= found.st_size


async def fill_disk(context: DrillContext) -> None:
    """Leave no room for a second checkpoint on the machine's disk; then take the memory that makes disks needed."""
    ranks = context.spec.topology().ranks(context.machines.index(context.target))
    await context.until(
        lambda: all(context.stored.disk_steps(rank) for rank in ranks),
        START_LIMIT_S + SETTLE_LIMIT_S,
        f"{context.target.name} wrote no checkpoint to its disk",
    )
    mounts.shrink(disk_of(context), DISK_SPARE)
    context.mark("disk-full")
    await await_finding(context)
    await await_told(context)
    step = await context.held_up()
    await context.listen(SAID_LIMIT_S, enough=lambda: bool(context.seen.said))
    await context.settled(step)
    await context.second_fault(exact=True)
