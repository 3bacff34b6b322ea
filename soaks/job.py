"""The job of a soak, with the plans for its ranks and workers: gates, and the faults of all episodes."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drills.clusters.local import DrillCluster
from drills.faults.lost_machines import KillMachine
from drills.inject.plan import Planned, planned
from drills.spec.fault import Entry
from drills.spec.request import DrillRequest
from everstep.errors import EverstepError
from everstep.model.job import JobSpec
from everstep.rank import drill_faults as faults
from everstep.rank import environment
from everstep.system import private_files as private
from soaks.plan import SoakPlan

POLICY: dict[str, Any] = {
    "hang.floor_s": 45.0,
    "confirm.timeout_s": 20.0,
    "stop.exit_grace_s": 3.0,
    "progress.steady_steps": 3,
    "progress.steady_s": 0.0,
    "ladder.repeats": 0,
    "ladder.restarts": 0,
    "retry.backoff_initial_s": 0.2,
    "rollback.steps": 4,
    "rollback.within_s": 0.0,
    "silence.evict_s": 20.0,
    "evict.at_least": 1000,
}
"""The recovery policy of a soak's job.

Waiting at a gate is no hang. Hundreds of faults do not park the job, and dozens of evictions need no operator. A fault
after the next gate does not make an earlier version suspect. A machine that comes back is not replaced, even on a busy
computer."""
ANSWER_S = 15.0
"""A killed worker answers again within this time, seconds."""
GATE_S = 600.0
"""Longest wait of ranks at a gate, seconds; on a busy computer the observations take a minute."""
STRIKE_S = 20.0
"""Longest wait of ranks for faults from outside, seconds; a longer wait would count as a hang."""
BEFORE_GATE = 2
"""Ranks wait for faults from outside this many steps before the next gate."""


@dataclass(frozen=True, slots=True)
class SoakGate:
    """A step at which all ranks wait."""

    folder: Path
    step: int
    ranks: int
    name: str = "gate"
    longest_s: float = GATE_S

    @property
    def marks(self) -> Path:
        """The path with which the marks of all arrived ranks begin."""
        return self.folder / f"{self.name}.json"

    @property
    def reached(self) -> bool:
        """Whether all ranks have arrived."""
        return all(faults.fired(self.marks, {"id": f"{self.name}-{rank}"}) for rank in range(self.ranks))

    def open(self) -> None:
        """Let the job continue."""
        self._opened.touch()

    @property
    def _opened(self) -> Path:
        return self.folder / f"{self.name}.open"

    def holds(self) -> list[Entry]:
        """Return the entries for the ranks' plan."""
        return [
            {
                "id": f"{self.name}-{rank}",
                "fault": "hold",
                "rank": rank,
                "at_step": self.step,
                "point": "begin",
                "until": str(self._opened),
                "hold_s": self.longest_s,
                "marks": str(self.marks),
            }
            for rank in range(self.ranks)
        ]


class SoakJob:
    """One job that runs through all episodes of a plan.

    Args:
        cluster: The open cluster.
        plan: The plan of the soak.
        name: Name of the job.
    """

    def __init__(self, cluster: DrillCluster, plan: SoakPlan, name: str) -> None:
        self.cluster, self.plan = cluster, plan
        self.folder = cluster.home / "drills" / name
        disk = cluster.home / "disk"
        disk.mkdir(exist_ok=True)  # all machines see it at this path, as they see a shared file system
        base = DrillRequest(
            fault=KillMachine(),  # a job for this fault has backups, and checkpoints on a shared disk
            at_step=plan.gate(0),
            steps=plan.steps,
            step_seconds=plan.step_seconds,
            **plan.sizes.model_dump(),
        )
        env = {environment.FAULTS: str(self.folder / "faults.json"), environment.STATE_DIGEST: "1"}
        spec = base.spec(name, env, disk=disk)
        self.spec: JobSpec = spec.model_copy(update={"policy": spec.policy.changed(POLICY)})
        self.machines = cluster.machines[: self.spec.machines]
        """The job's machines in order: ``m1`` in a plan is the second of them."""

    async def refresh(self) -> None:
        """Read the machines on which the job runs now.

        Raises:
            EverstepError: the job's state is not known within the time limit.
        """
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                self.machines = (await self.cluster.control.state(self.spec.name)).machines
                return
            except EverstepError:  # the fault may have struck the control plane
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)

    def episode_folder(self, index: int) -> Path:
        """Return the folder of the marks of the episode with this index. The index after the last episode is for the
        last gate."""
        return self.folder / f"at-{index:04d}"

    def gate(self, index: int) -> SoakGate:
        """Return the gate before the episode with this index."""
        return SoakGate(self.episode_folder(index), self.plan.gate(index), self.spec.topology().world_size)

    def strikes(self, index: int) -> SoakGate:
        """Return the step shortly before the next gate at which ranks wait until all faults from outside have struck.

        On a busy computer such faults may be late, and a fault that strikes at a gate would let the job run past the
        gate.
        """
        step = self.plan.gate(index + 1) - BEFORE_GATE
        return SoakGate(self.episode_folder(index), step, self.spec.topology().world_size, "strikes", STRIKE_S)

    def planned(self, index: int, position: int) -> Planned:
        """Return the plan for one fault of an episode, with the processes that the cluster has now."""
        request = self.plan.request(index, position)
        marks = self.episode_folder(index) / f"fault-{position}.json"
        made = planned(request, self.spec, marks, self.cluster)
        if request.fault.is_control:
            workers = [{**fault, "marks": str(marks)} for fault in made.workers]
            return replace(made, ranks=[], outside=[], holds=[], workers=workers)
        # The next gate waits until the absent part is back, so the ranks need not wait for it.
        absent_part = request.waits_at_hold and not request.opening.is_update
        holds = [] if absent_part else made.holds
        return replace(made, ranks=self._after_the_first(index, position, made.ranks), holds=holds)

    def _after_the_first(self, index: int, position: int, ranks: list[Entry]) -> list[Entry]:
        """Return the entries for ranks of one fault. Within a recovery, they fire only after the first fault has
        fired."""
        if position == 0 or self.plan.episodes[index].how != "within":
            return ranks
        first = self.planned(index, 0)
        opens = [*first.ranks, *first.outside][-1]
        mark = first.plan.with_name(f"{first.plan.name}.{opens['id']}")
        return [{**fault, "after": str(mark)} for fault in ranks]

    def write(self) -> None:
        """Write the ranks' entries of all episodes, since ranks read them only at their start."""
        entries: list[Entry] = []
        for index, episode in enumerate(self.plan.episodes):
            entries += self.gate(index).holds() + self.strikes(index).holds()
            for position, fault in enumerate(episode.faults):
                if not fault.is_control:
                    made = self.planned(index, position)
                    entries += [{**fault, "marks": str(made.plan)} for fault in (*made.ranks, *made.holds)]
        entries += self.gate(len(self.plan.episodes)).holds()
        for index in range(len(self.plan.episodes) + 1):
            self.episode_folder(index).mkdir(parents=True, exist_ok=True)
        private.replace(self.folder / "faults.json", json.dumps(entries).encode())

    def arm_workers(self, entries: list[Entry]) -> None:
        """Write the workers' entries of the current episode."""
        private.replace(self.cluster.worker_plan, json.dumps(entries).encode())
