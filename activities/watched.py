"""What a watcher knows of one job, and what it concludes from it.

All of it can be learned again from the agents. No input or output here; time is
an argument.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from activities.convert import seen_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.align import Aligned, AlignRule, Backed
from everstep.decisions.persist import OnDisk, PersistRule
from everstep.decisions.unsaved import Saves, judge_saves
from everstep.decisions.watch import Finished, Seen, StallRule, judge_exits, loss_anomaly, stall_anomaly
from everstep.incident import Anomaly
from everstep.job import JobSpec
from everstep.machine import Machine

SILENT_S = 10.0
"""An agent that said nothing for this long, although it speaks every second, is named in a stall (ours)."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a machine showed of one of its ranks last."""

    machine: str
    now_ns: int
    """Clock of the machine."""
    rank: pb.RankProgress

    @property
    def steps(self) -> int:
        """Completed steps, or calls of the optimizer where the script reports none."""
        return max(self.rank.completed_steps, self.rank.optimizer_steps)


@dataclass(slots=True)
class Watched:
    """One job."""

    spec: JobSpec
    machines: list[Machine]
    began_ns: int
    """When the job began, as far as the watcher knows."""
    known: tuple[int, int] | None = None
    """Generation and step that the job's workflow knew of when the watch began: should no agent ever answer, the
    silence is noticed all the same."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something new to judge at once."""
    reported: set[int] = field(default_factory=set)
    """Generations whose end the workflow was told of."""
    newest: dict[str, dict[int, int]] = field(default_factory=dict)
    """Machine → generation → newest sequence number of an observation."""
    _ends: dict[int, dict[int, Seen]] = field(default_factory=dict)
    """Generation → rank → end."""
    _shown: dict[int, Shown] = field(default_factory=dict)
    _heard: dict[str, int] = field(default_factory=dict)
    """Machine → when its agent said anything."""
    _launched: dict[str, int] = field(default_factory=dict)
    """Machine → newest generation that it showed."""
    _emptied: dict[str, int] = field(default_factory=dict)
    """Machine → the generation that it had shown before it knew the job no more."""
    _saves: set[int] = field(default_factory=set)
    """Ranks that were seen to save."""
    _begun: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Generation, rank) → completed steps when it was seen first."""
    _stall: dict[int, StallRule] = field(default_factory=dict)
    _persist: dict[int, PersistRule] = field(default_factory=dict)
    _align: dict[int, AlignRule] = field(default_factory=dict)

    def ended(self, machine: str, observation: pb.Observation) -> None:
        """A rank ended."""
        generation = observation.generation
        self._ends.setdefault(generation, {})[observation.rank_exited.rank] = seen_of(observation)
        self.newest.setdefault(machine, {})[generation] = observation.sequence
        self.woken.set()

    def ends(self, generation: int) -> int:
        """How many ranks of a generation have ended."""
        return len(self._ends.get(generation, ()))

    def showed(self, machine: str, reply: pb.ProgressReply, now_ns: int) -> None:
        """A machine showed where its ranks stand."""
        self._heard[machine] = now_ns
        if reply.generation:
            self._launched[machine] = reply.generation
            self._emptied.pop(machine, None)
        elif machine in self._launched and machine not in self._emptied:
            self._emptied[machine] = self._launched[machine]
            self.woken.set()
        for rank in reply.ranks:
            self._shown[rank.rank] = Shown(machine, reply.time_ns, rank)
            self._begun.setdefault((rank.generation, rank.rank), rank.completed_steps)
            if rank.saved.own_step >= 0 and rank.HasField("saved"):
                self._saves.add(rank.rank)

    def dealt_with(self, machine: str) -> int:
        """Newest observation of a machine that the workflow need not be told of any more; 0: none."""
        newest = max(self.reported, default=0)
        return max((seq for found, seq in self.newest.get(machine, {}).items() if found <= newest), default=0)

    def verdicts(self, now_ns: int) -> Iterator[Anomaly | Finished]:
        """What the job's workflow should be told, oldest generation first; each until it is in ``reported``."""
        world_size, policy = self.spec.topology().world_size, self.spec.policy
        for generation, ends in sorted(self._ends.items()):
            if generation not in self.reported:
                seen = list(ends.values())
                verdict = judge_exits(generation, seen, world_size=world_size, now_ns=now_ns, policy=policy)
                if verdict is not None:
                    yield verdict
        for judge in (self._lost, self._stalled, self._unsaved):
            anomaly = judge(now_ns)
            if anomaly is not None:
                yield anomaly

    def persist(self, now_ns: int) -> int | None:
        """The step that all machines should be asked to write to disk, now; None: none."""
        generation = self._generation()
        if generation is None:
            return None
        rule = self._persist.setdefault(generation, PersistRule(self.spec.checkpoint, self.began_ns))
        ranks = [
            OnDisk(
                rank=one.rank.rank,
                completed_steps=one.rank.completed_steps,
                disk_ns=one.rank.saved.disk_ns,
                wanted=one.rank.saved.disk_wanted,
            )
            for one in self._of(generation)
            if one.rank.alive and one.rank.HasField("saved")
        ]
        return rule.observe(ranks, now_ns)

    def whole_on_disk(self) -> int:
        """The step on disk that every rank names as its newest; 0: they name different ones, or none."""
        generation = self._generation()
        steps = {one.rank.rank: one.rank.saved.disk_step for one in self._of(generation)} if generation else {}
        everybody = len(steps) == self.spec.topology().world_size
        return max(*steps.values(), 0) if everybody and len(set(steps.values())) == 1 else 0

    def align(self, now_ns: int) -> tuple[int, Aligned] | None:
        """What all machines should be told of each other's backups, and in which generation; None: nothing."""
        generation, policy = self._generation(), self.spec.checkpoint
        if generation is None or not policy.backup or self.spec.machines == 1:
            return None
        rule = self._align.setdefault(generation, AlignRule(self.spec.topology().world_size, policy.backup_every_steps))
        ranks = [
            Backed(
                rank=one.rank.rank,
                own_step=one.rank.saved.own_step,
                backup_step=one.rank.saved.backup_step,
                named=one.rank.saved.backup_named,
                whole=one.rank.saved.backup_whole,
                calm=one.rank.saved.backup_calm,
                failing=one.rank.saved.backup_problem != "",
            )
            for one in self._of(generation)
            if one.rank.alive and one.rank.HasField("saved")
        ]
        aligned = rule.observe(ranks, now_ns)
        return (generation, aligned) if aligned else None

    def _generation(self) -> int | None:
        """The newest one that was seen, unless it is dealt with."""
        found = [one.rank.generation for one in self._shown.values()]
        newest = max(found, default=self.known[0] if self.known else None)
        return None if newest in self.reported else newest

    def _of(self, generation: int) -> list[Shown]:
        return [one for one in self._shown.values() if one.rank.generation == generation]

    def _lost(self, now_ns: int) -> Anomaly | None:
        """Machines that came back empty, without the ranks that they ran."""
        generation = self._generation()
        topology = self.spec.topology()
        lost = {
            machine.name: topology.ranks(index)
            for index, machine in enumerate(self.machines)
            if generation is not None and self._emptied.get(machine.name) == generation
        }
        return loss_anomaly(generation, lost, job=self.spec.name, now_ns=now_ns) if generation and lost else None

    def _stalled(self, now_ns: int) -> Anomaly | None:
        generation = self._generation()
        if generation is None:
            return None
        counts = [one.steps for one in self._of(generation)]
        if not counts:
            counts = [self.known[1]] if self.known and self.known[0] == generation else [0]
        quiet_s = self._stall.setdefault(generation, StallRule(self.spec.policy)).observe(sum(counts), now_ns)
        if quiet_s is None:
            return None
        silent = [m.name for m in self.machines if now_ns - self._heard.get(m.name, -math.inf) > SILENT_S * 1e9]
        return stall_anomaly(
            generation, job=self.spec.name, quiet_s=quiet_s, step=max(counts), now_ns=now_ns, silent=silent
        )

    def _unsaved(self, now_ns: int) -> Anomaly | None:
        generation = self._generation()
        if generation is None:
            return None
        ranks = [
            Saves(
                rank=one.rank.rank,
                machine=one.machine,
                generation=generation,
                completed_steps=one.rank.completed_steps,
                own_step=self._own_step(one.rank),
                own_ns=one.rank.saved.own_ns,
                first_step_ns=one.rank.milestones.first_step,
                now_ns=one.now_ns,
            )
            for one in self._of(generation)
            if one.rank.alive and one.rank.HasField("saved")
        ]
        return judge_saves(ranks, job=self.spec.name, generation=generation, policy=self.spec.checkpoint)

    def _own_step(self, rank: pb.RankProgress) -> int:
        """Newest own save; where a rank that saved in an earlier generation has none yet, the step it began with."""
        if rank.saved.own_step < 0 and rank.rank in self._saves:
            return self._begun[rank.generation, rank.rank]
        return rank.saved.own_step
