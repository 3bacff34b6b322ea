"""Faults that damage a copy of the training state, which a restore then needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from drills.faults.fault import Fault
from drills.inject.context import DrillContext
from drills.observe.stored_copies import Damaged
from drills.spec import settings
from drills.spec.fault import OnRanks, refuse_without_backups, refuse_without_disk, with_peer
from drills.spec.job_options import JobOptions
from drills.spec.loss import Loss
from drills.spec.settings import placement_of
from everstep.errors import ClusterError
from everstep.model.job import JobSpec
from everstep.slots.format import PAGE, SLOT_BYTES, StoredSlot, file_header, slot_at

Where = Literal["buffer", "backup", "file"]


class DamagedCopy(OnRanks, Fault):
    """A rank's newest copy is damaged, and then the processes and machines with intact copies are killed."""

    strike_delay: ClassVar = 0

    def damage(self, context: DrillContext, rank: int, step: int, on_disk: int) -> Damaged:
        """Damage a copy now.

        Args:
            context: The drill.
            rank: The rank of the copy.
            step: The step at which the job waits.
            on_disk: The newest step on disk.

        Raises:
            ClusterError: there is no such copy.
        """
        raise NotImplementedError

    async def strike(self, context: DrillContext) -> None:
        """Damage the copy once all saves of the step are complete; then strike."""
        step = await context.await_holds()
        every = context.spec.checkpoint.disk_every_steps
        on_disk = step - step % every if every else 0
        await context.await_saves(step, disk=on_disk)
        damaged = self.damage(context, self.struck_ranks(context.spec)[0], step, on_disk)
        context.mark(self.name, path=str(damaged.path), what=damaged.what)
        context.seen.damaged.append(damaged)
        context.cluster.say(f"{damaged.path}: {damaged.what}")
        await context.second_fault(exact=True)


class FlipBit(DamagedCopy):
    """One bit of a copy is flipped."""

    name = "flip-bit"
    summary = "one bit of a rank's saved state flips, and the processes or machines with the better copies are killed"
    line = "a bit of the state of {ranks} flips in its"
    drawn = {"where": get_args(Where)}

    where: Where = Field(
        description="The copy: in own memory (buffer), in the peer's memory (backup), or on disk (file)."
    )

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a copy that the job does not have."""
        super().refuse(drill, spec)
        if self.where == "backup":
            refuse_without_backups(self, spec)
        if self.where == "file":
            refuse_without_disk(self, drill, spec)

    def describe(self, spec: JobSpec) -> str:
        rank = self.struck_ranks(spec)[0]
        peer = placement_of(spec).peers[rank]
        machine = f"m{spec.topology().machine(peer)}" if peer is not None else "no machine"
        copy = {"buffer": "own memory", "backup": f"backup on {machine}", "file": "newest file on disk"}[self.where]
        return f"{super().describe(spec)} {copy}"

    def loss(self, spec: JobSpec) -> Loss:
        """Return the rank, or the machines, with intact copies of the same step."""
        rank = self.struck_ranks(spec)[0]
        if self.where == "buffer":
            return Loss(ranks=(rank,))
        holders = {spec.topology().machine(rank)} if self.where == "backup" else with_peer(spec, rank)
        return Loss(tuple(sorted(holders)))

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        """Return the settings that the copy needs. A copy in own memory is verified as late as a large one: after the
        choice."""
        wanted = {"file": settings.disk_settings(disk), "buffer": {"verify_at_stop_mb": 0.0}, "backup": {}}
        return wanted[self.where]

    def damage(self, context: DrillContext, rank: int, step: int, on_disk: int) -> Damaged:
        stored = context.stored
        backup = stored.backup(rank)
        if self.where == "file":
            return flip_in_file(stored.on_disk(rank, on_disk, "safetensors"), rank, on_disk)
        if self.where == "backup" and backup is not None:
            return flip_in_slot(backup, rank, max(stored.backup_steps(rank)))
        return flip_in_slot(stored.own(rank), rank, step)


class TruncateFile(DamagedCopy):
    """A rank's file of a checkpoint on disk is cut short."""

    name = "truncate-file"
    summary = "a rank's newest checkpoint on disk is cut short, and then needed"
    shared_disk = True
    line = "the newest file on disk of {ranks} is cut short"

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a job without checkpoints on disk."""
        super().refuse(drill, spec)
        refuse_without_disk(self, drill, spec)

    def loss(self, spec: JobSpec) -> Loss:
        """Return the machines with copies of the rank's state in memory."""
        return Loss(tuple(sorted(with_peer(spec, self.struck_ranks(spec)[0]))))

    def damage(self, context: DrillContext, rank: int, step: int, on_disk: int) -> Damaged:
        return truncate(context.stored.on_disk(rank, on_disk, "safetensors"), rank, on_disk)


def flip_in_slot(path: Path, rank: int, step: int) -> Damaged:
    """Flip a bit in the middle of the copy of a step in a checkpoint file in shared memory.

    Raises:
        ClusterError: the file has no copy of that step.
    """
    with path.open("r+b", buffering=0) as file:
        for index in range(file_header(file.read(PAGE)).slots):
            slot = StoredSlot.unpack(os.pread(file.fileno(), SLOT_BYTES, slot_at(index)))
            if slot.completed_steps == step:
                middle = slot.at + (slot.tensor_bytes or slot.payload_bytes) // 2
                return Damaged(path, rank, step, _flip(file.fileno(), middle))
    raise ClusterError(f"{path} has no copy of step {step} of rank {rank}, so nothing can be damaged")


def flip_in_file(path: Path, rank: int, step: int) -> Damaged:
    """Flip a bit in the middle of a file."""
    with path.open("r+b", buffering=0) as file:
        return Damaged(path, rank, step, _flip(file.fileno(), os.fstat(file.fileno()).st_size // 2))


def truncate(path: Path, rank: int, step: int) -> Damaged:
    """Cut the second half of a file off."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return Damaged(path, rank, step, f"cut from {size} to {size // 2} bytes")


def _flip(descriptor: int, at: int) -> str:
    byte = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte[0] ^ 1]), at)
    return f"bit 0 of byte {at} flipped"
