"""Ranks of a job that save by themselves, and the tiers below their memory. There is no agent and no torch."""

from __future__ import annotations

import random
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.saved_state import SavedStates
from agent.checkpoints.tiers.job_tiers import JobTiers
from agent.v1 import agent_pb2 as pb
from everstep.slots.file import SlotFile
from everstep.slots.format import SlotHeader
from everstep.slots.reader import held
from everstep.slots.tensor_table import TensorSpec, pack_table

RUNS = ("20261121-193158.042-0197f3a2", "20261121-200000.000-0297f3a2")
"""The ids of a run of the job and of a later run."""
JOB = "gpt"
DISK, REMOTE = pb.HeldCheckpoint.DISK, pb.HeldCheckpoint.REMOTE


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s:g} s this is still not true: {what}"
        time.sleep(0.005)


def contents(rank: int, step: int, size: int, *, shared: int = 0) -> bytes:
    """Return the tensors of a rank: ``shared`` bytes that are equal on all ranks, and then the rank's own bytes."""
    alike = random.Random(f"all {step}").randbytes(shared)
    return alike + random.Random(f"{rank} {step}").randbytes(size - shared)


class Rank:
    """The part of a rank: it has a file with slots."""

    def __init__(
        self, place: Place, rank: int, *, size: int, generation: int = 1, slots: int = 3, shared: int = 0
    ) -> None:
        self.rank, self.size, self.shared = rank, size, shared
        self.path = place.shm / f"checkpoint-{rank}"
        self.file = SlotFile(self.path, slots=slots, owner=place.owner(rank), generation=generation)

    def save(self, step: int) -> SlotHeader:
        specs = [
            TensorSpec("model.weight", "uint8", (self.shared,), 0, self.shared, "cpu"),
            TensorSpec("rng", "uint8", (self.size - self.shared,), self.shared, self.size - self.shared, "cpu"),
        ]
        self.file.begin(pack_table(specs) + b"the tree", self.size)
        with self.file.tensors() as view:
            view[:] = contents(self.rank, step, self.size, shared=self.shared)
        return self.file.commit(step)


class Machine:
    """One machine with some ranks of a job."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: tuple[int, ...] = (0, 1),
        name: str = "m1",
        run: str = RUNS[0],
        world: int = 2,
        size: int = 40_000,
        shared: int = 0,
        **options: Any,
    ) -> None:
        self.ranks_here, self.world, self.size, self.shared = ranks, world, size, shared
        self.shm = Path("/dev/shm") / f"everstep-tiers-{uuid.uuid4().hex[:8]}" / JOB
        self.shm.mkdir(parents=True)
        self.saved = SavedStates()
        self.place = Place(JOB, name, self.shm, folder / name, self.saved, run)
        self.options = pb.CheckpointOptions(
            **{"slots": 4, "disk": True, "disk_every_steps": 10, "disk_keep": 2, "remote_keep": 2, **options}
        )
        self.tiers = self.made()
        self.ranks: dict[int, Rank] = {}
        self.generation = 1

    def made(self) -> JobTiers:
        """Return the tiers as a new agent makes them. They fetch copies with ``fetched``."""
        return JobTiers(self.place, self.fetched)

    def turn_to(self, run: str) -> None:
        """Change to another run, as an agent does that starts anew."""
        self.place = replace(self.place, run=run)
        self.tiers = self.made()

    def fetched(self, address: str, job: str, rank: int, step: int, view: memoryview) -> SlotHeader:
        raise AssertionError("nothing is to be fetched")

    def launch_options(self, generation: int = 1, resume_step: int = 0) -> LaunchOptions:
        return LaunchOptions(
            generation=generation,
            resume_step=resume_step,
            ranks=self.ranks_here,
            options=self.options,
            topology=f"1,{self.world},1,1,pp-dp-tp",
            run=self.place.run,
        )

    def launch(self, generation: int = 1, resume_step: int = 0) -> None:
        self.generation = generation
        for rank in self.ranks.values():
            rank.file.close()
        self.ranks = {
            rank: Rank(
                self.place, rank, size=self.size, generation=generation, slots=self.options.slots, shared=self.shared
            )
            for rank in self.ranks_here
        }
        for one in self.ranks.values():
            one.file.discard_after(resume_step or -1)
        self.saved.clear()
        self.tiers.open(self.launch_options(generation, resume_step))

    def save(self, *steps: int, ranks: tuple[int, ...] | None = None) -> None:
        for step in steps:
            for rank in ranks or self.ranks_here:
                self.tiers.on_saved(rank, self.ranks[rank].save(step))

    def persist(self, step: int = 0, **told: Any) -> None:
        self.tiers.persist(pb.PersistRequest(job=JOB, step=step, **{"generation": self.generation, **told}))

    def on_disk(self, step: int) -> None:
        """Wait until a step is on disk for all ranks of this machine."""
        wait_for(lambda: all(self.saved.of(rank).disk_step >= step for rank in self.ranks_here), f"step {step} on disk")

    def on_remote(self, step: int) -> None:
        wait_for(
            lambda: all(self.saved.of(rank).remote_step >= step for rank in self.ranks_here), f"step {step} on remote"
        )

    def problem(self) -> str:
        return self.saved.of(self.ranks_here[0]).disk_problem

    def held(self, **request: Any) -> list[pb.HeldCheckpoint]:
        return self.tiers.held(pb.CheckpointsRequest(job=JOB, **request))

    def steps(self, **request: Any) -> dict[int, list[int]]:
        """Return rank → steps with valid copies."""
        found: dict[int, list[int]] = {}
        for one in self.held(**request):
            if one.valid:
                found.setdefault(one.rank, []).append(one.completed_steps)
        return found

    def restore(self, rank: int, step: int, tier: pb.HeldCheckpoint.Tier.ValueType = DISK, **more: Any) -> int:
        shard = pb.ShardSource(rank=rank, completed_steps=step, tier=tier, machine=self.place.machine, **more)
        return self.tiers.restore(shard, self.options, 9)

    def holds(self, rank: int, step: int) -> bool:
        """Return whether the own slot of a rank has exactly what the rank saved."""
        path = self.shm / f"checkpoint-{rank}"
        if not any(one.valid and one.completed_steps == step for one in held(path)):
            return False
        file = SlotFile(path, owner=self.place.owner(rank))
        try:
            payload = file.load(step)
            return bytes(payload.tensors[: self.size]) == contents(rank, step, self.size, shared=self.shared)
        finally:
            file.close()

    def lose_memory(self) -> None:
        for rank in self.ranks.values():
            rank.file.close()
        for path in self.shm.iterdir():
            path.unlink()

    def close(self) -> None:
        self.tiers.close()
        for rank in self.ranks.values():
            rank.file.close()
        shutil.rmtree(self.shm.parent)
