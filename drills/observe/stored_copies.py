"""The stored copies of a job's state on a local cluster, read from the files and not from the agents' answers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from controlplane.local.cluster_file import ClusterFile
from controlplane.local.power import state_folder
from drills.spec.loss import Loss
from drills.spec.settings import placement_of
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.shards.folders import step_name
from everstep.slots.format import PAGE, SAVING, SLOT_BYTES, StoredSlot, backup_slots, file_header, own_slots, slot_at
from everstep.slots.reader import held


@dataclass(frozen=True, slots=True)
class Damaged:
    """A copy that a drill damaged."""

    path: Path
    rank: int
    step: int
    """Completed steps of the copied state."""
    what: str
    """The damage as text, such as ``bit 0 of byte 4711 flipped``."""


def steps_in(path: Path) -> set[int]:
    """Return the steps of the copies in a checkpoint file in shared memory, according to its headers."""
    return {slot.completed_steps for slot in held(path, verify=False) if slot.valid}


class StoredCopies:
    """The stored copies of one job.

    Args:
        cluster: The cluster.
        spec: The job.
        machines: The job's machines, in order; by default the first ones of the cluster.
    """

    def __init__(self, cluster: ClusterFile, spec: JobSpec, machines: Sequence[Machine] | None = None) -> None:
        self._cluster = cluster
        self._machines = cluster.machines if machines is None else machines
        self._spec = spec
        self._topology = spec.topology()
        self._peers = placement_of(spec).peers

    def machine(self, index: int) -> str:
        """Return the name of the job's machine at this position."""
        return self._machines[index].name

    def own(self, rank: int) -> Path:
        """Return the file of a rank's copies in its own memory."""
        return own_slots(self._shm(self._topology.machine(rank)), rank)

    def backup(self, rank: int) -> Path | None:
        """Return the file of a rank's copies in its peer's memory; None: the rank has no peer."""
        peer = self._peers[rank]
        return None if peer is None else backup_slots(self._shm(self._topology.machine(peer)), rank)

    def on_disk(self, rank: int, step: int, suffix: str) -> Path:
        """Return the file with this suffix of a rank, in the checkpoint of a step on disk."""
        return self._disk(self._topology.machine(rank)) / step_name(step) / f"rank-{rank}.{suffix}"

    def own_steps(self, rank: int) -> set[int]:
        """Return the steps of the copies in a rank's own memory."""
        return steps_in(self.own(rank))

    def backup_steps(self, rank: int) -> set[int]:
        """Return the steps of the copies in the memory of a rank's peer."""
        path = self.backup(rank)
        return steps_in(path) if path else set()

    def disk_steps(self, rank: int) -> set[int]:
        """Return the steps of a rank's complete files on disk: those with a manifest, which is written last."""
        found = set()
        for manifest in self._disk(self._topology.machine(rank)).glob(f"step-*/rank-{rank}.json"):
            with suppress(ValueError):
                found.add(int(manifest.parent.name.removeprefix("step-")))
        return found

    def left(self, loss: Loss, damaged: Iterable[Damaged] = (), *, disks: bool = True) -> dict[int, set[int]]:
        """Rank → the steps with an intact copy after a loss.

        Args:
            loss: The machines, disks and ranks that are lost.
            damaged: Copies that exist but are damaged.
            disks: Whether copies on disks count too.
        """
        shared = bool(self._spec.checkpoint.disk_path)
        bad = {(copy.path, copy.step) for copy in damaged}
        found = {}
        for rank in range(self._topology.world_size):
            home, peer, backup = self._topology.machine(rank), self._peers[rank], self.backup(rank)
            steps = set()
            if home not in loss.machines:
                steps |= {step for step in self.own_steps(rank) if (self.own(rank), step) not in bad}
            if peer is not None and self._topology.machine(peer) not in loss.machines:
                steps |= {step for step in self.backup_steps(rank) if (backup, step) not in bad}
            if disks and (shared or not loss.disks or home not in loss.machines):
                files = {step: self.on_disk(rank, step, "safetensors") for step in self.disk_steps(rank)}
                steps |= {step for step, path in files.items() if (path, step) not in bad}
            found[rank] = steps
        return found

    def newest(self) -> int:
        """Return the newest step of which any rank has a copy in its own memory; 0: there is none."""
        return max((step for rank in range(self._topology.world_size) for step in self.own_steps(rank)), default=0)

    def receiving(self, machine: int) -> int | None:
        """Return a rank whose backup the machine at this position receives now; None: it receives none."""
        for rank, peer in enumerate(self._peers):
            path = self.backup(rank)
            if path and peer is not None and self._topology.machine(peer) == machine and _is_being_written(path):
                return rank
        return None

    def _shm(self, machine: int) -> Path:
        return self._cluster.shm / self.machine(machine) / self._spec.name

    def _disk(self, machine: int) -> Path:
        configured = self._spec.checkpoint.disk_path
        base = Path(configured) if configured else state_folder(self._cluster, self.machine(machine)) / "checkpoints"
        return base / self._spec.name


def _is_being_written(path: Path) -> bool:
    with suppress(OSError), path.open("rb", buffering=0) as file:
        for index in range(file_header(file.read(PAGE)).slots):
            page = os.pread(file.fileno(), SLOT_BYTES, slot_at(index))
            if len(page) == SLOT_BYTES and StoredSlot.unpack(page).phase == SAVING:
                return True
    return False
