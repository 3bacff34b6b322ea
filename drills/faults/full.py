"""Faults that make a file system of a machine too small for checkpoints, in shared memory or on disk."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from controlplane.local import cluster_processes, mounts, power, readiness
from drills.faults.fault import Fault
from drills.inject.context import SETTLE_LIMIT_S, DrillContext
from drills.inject.detection import await_finding, await_report
from drills.spec import settings
from drills.spec.fault import (
    ExpectedFinding,
    OnMachine,
    owners,
    refuse_without_backups,
    refuse_without_disk,
    with_peer,
)
from drills.spec.job_options import JobOptions
from drills.spec.loss import Loss
from everstep.errors import ClusterError, ConfigError
from everstep.model.finding import Owner
from everstep.model.job import JobSpec
from everstep.slots.format import own_slots

AMPLE = 4 << 30
"""Size of a file system at the beginning, bytes; the file system uses memory only for its files."""
REPORTS = 300_000
"""Size of the step reports of one rank and generation, bytes: 4096 records of 64 bytes, and a margin."""
GENERATIONS = 3
"""Number of generations whose reports may exist at once before the job is parked."""
SPARE = 64 << 10
"""Free room in shared memory, bytes: less than a checkpoint needs."""
DISK_SPARE = 16 << 10
"""Free room on the disk, bytes: less than its inspection allows, even with small checkpoints."""
START_LIMIT_S = 60.0
"""The job starts and makes its first saves within this time, seconds."""
REPORTED_LIMIT_S = 20.0
"""A problem with backups or disks is reported within this time, seconds."""

Fits = Literal["nothing", "own"]


class FullFileSystem(OnMachine, Fault):
    """A file system of a machine has no room left."""

    own_job = True

    def why_not(self) -> str:
        return mounts.why_not(Path(tempfile.gettempdir()))

    @property
    def strike_delay(self) -> int | None:
        return None if self.parks else 0


class MemoryFull(FullFileSystem):
    """The shared memory of a machine is too small for checkpoints."""

    name = "shm-full"
    summary = "shared memory too small for the machine's own checkpoints, or for the backups that others send"
    drawn = {"fits": get_args(Fits)}

    fits: Fits = Field(
        "nothing", description="What fits: nothing, or the machine's own checkpoints but no backups of other machines."
    )

    @property
    def must_be_reported(self) -> bool:
        return not self.parks

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a job without backups."""
        super().refuse(drill, spec)
        if not self.parks:
            refuse_without_backups(self, spec)

    def describe(self, spec: JobSpec) -> str:
        room = "nothing" if self.parks else "its own ranks only"
        return f"shared memory of {self.struck_machine(spec)} has room for {room}"

    @property
    def parks(self) -> bool:
        """The job is parked if nothing fits."""
        return self.fits == "nothing"

    parked_words = ("no room",)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.name,) if self.parks else super().marks

    def loss(self, spec: JobSpec) -> Loss:
        """Return the machine of a rank whose backup has no room, unless the job is parked."""
        if self.parks:
            return Loss()
        return Loss((spec.topology().machine(owners(spec, self.machine_index(spec))[0]),))

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        """Checkpoints on disk, unless the job is parked."""
        return {} if self.parks else settings.disk_settings(disk)

    @contextmanager
    def prepared(self, context: DrillContext) -> Iterator[None]:
        """Give the machine a new file system as shared memory, while its agent and fork servers are off."""
        size = SPARE + REPORTS * GENERATIONS * context.spec.ranks_per_machine if self.parks else AMPLE
        target, cluster = context.target, context.cluster.file
        with ExitStack() as mounted:
            with power.powered_off(cluster, [target.name]):
                mounted.enter_context(mounts.small(context.memory, size))
            try:
                readiness.agent_serves(cluster, target.name, target.address)
                if self.parks:
                    context.mark(self.name, bytes=size)
                yield
            finally:
                with power.powered_off(cluster, [target.name]):
                    mounted.close()
                readiness.agent_serves(cluster, target.name, target.address)

    async def strike(self, context: DrillContext) -> None:
        """Shrink the shared memory until only the machine's own slots fit; then strike."""
        if self.parks:
            return  # the shared memory was too small from the beginning
        agent = cluster_processes.identify(context.agent(context.target))
        if agent is None:
            raise ClusterError(f"the agent of {context.target.name} is gone")
        ranks = context.spec.topology().ranks(context.machines.index(context.target))
        folder = context.memory / context.spec.name
        await context.until(
            lambda: all((folder / f"report-{rank}-1").exists() for rank in ranks),
            START_LIMIT_S,
            f"the ranks of {context.target.name} were not started",
        )
        cluster_processes.send(agent, signal.SIGSTOP)  # before the first save, so that the agent accepts no backup
        try:
            slots = [own_slots(folder, rank) for rank in ranks]
            await context.until(
                lambda: all(map(context.stored.own_steps, ranks)) and all(map(_allocated, slots)),
                START_LIMIT_S,
                "nothing was saved, or not all slots were allocated",
            )
            # The step reports of the next generation still fit, but a backup does not.
            mounts.shrink(context.memory, SPARE + REPORTS * len(ranks))
            context.mark(self.name)
        finally:
            cluster_processes.send(agent, signal.SIGCONT)
        step = await context.await_holds()
        await context.listen(REPORTED_LIMIT_S, enough=lambda: bool(context.seen.reported))
        every = context.spec.checkpoint.disk_every_steps
        await context.await_saves(step, backups=False, disk=step - step % every)
        await context.second_fault(exact=True)


class DiskFull(FullFileSystem):
    """The disk of a machine is full."""

    name = "disk-full"
    summary = "no space for checkpoints on a machine's disk; then memory is lost"
    line = "the disk of {machine} is full"
    fixed_finding = ExpectedFinding("disk-full", Owner.MACHINE)
    must_be_reported: ClassVar = True

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a job without checkpoints on a disk of each machine."""
        super().refuse(drill, spec)
        refuse_without_disk(self, drill, spec)
        if spec.checkpoint.disk_path:
            raise ConfigError(
                "disk-full: all machines share disk_path: remove it from the job file, or fill that disk yourself"
            )

    def loss(self, spec: JobSpec) -> Loss:
        """Return the machines that have copies of the struck machine's ranks in memory."""
        ranks = spec.topology().ranks(self.machine_index(spec))
        return Loss(tuple(sorted({holder for rank in ranks for holder in with_peer(spec, rank)})), disks=False)

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        """Checkpoints on the disk of each machine."""
        return {"disk_every_steps": settings.DISK_EVERY}

    def prepared(self, context: DrillContext) -> AbstractContextManager[None]:
        """Mount a separate file system for the machine's checkpoints."""
        return mounts.small(context.disk, AMPLE)

    async def strike(self, context: DrillContext) -> None:
        """Leave no room for a second checkpoint on the machine's disk; then strike."""
        ranks = context.spec.topology().ranks(context.machines.index(context.target))
        await context.until(
            lambda: all(context.stored.disk_steps(rank) for rank in ranks),
            START_LIMIT_S + SETTLE_LIMIT_S,
            f"{context.target.name} wrote no checkpoint to its disk",
        )
        mounts.shrink(context.disk, DISK_SPARE)
        context.mark(self.name)
        await await_finding(context)
        await await_report(context)
        step = await context.await_holds()
        await context.listen(REPORTED_LIMIT_S, enough=lambda: bool(context.seen.reported))
        await context.await_saves(step)
        await context.second_fault(exact=True)


def _allocated(path: Path) -> bool:
    """Return whether all slots of a checkpoint file have memory, which the rank allocates after its first save."""
    status = path.stat()
    return status.st_blocks * 512 >= status.st_size
