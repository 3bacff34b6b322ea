"""What a watcher knows of one job, and what it concludes from it.

All of it can be learned again from the agents. No input or output here; time is
an argument.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from activities.agents.convert import seen_of
from activities.watching.shown import Shown, distinct, has_left_loop, kept_elsewhere, on_disk, stored
from agent.reporting.observations import OF_NO_JOB
from agent.v1 import agent_pb2 as pb
from everstep.decisions.checkpoints.align_backups import Aligned, AlignRule, Backed
from everstep.decisions.checkpoints.common_disk_step import Agreed, StepsOnDisk, agree, newest_of_all
from everstep.decisions.checkpoints.disk_schedule import PersistRule
from everstep.decisions.clocks import stream_shift_ns
from everstep.decisions.detect.drift import DriftRule, Standing
from everstep.decisions.detect.exits import Finished, ObservedExit, StallRule, judge_exits, loss_anomaly, stall_anomaly
from everstep.decisions.detect.stale_checkpoints import Saves, judge_saves
from everstep.decisions.recover.confirm import FREE
from everstep.model.incident import Anomaly
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

SILENT_S = 10.0
"""An agent that said nothing for this long, although it speaks every second, is named in a stall (ours)."""
BARE_S = 5.0
"""While a machine says that it knows nothing of the job, the job's workflow is asked this often whether it runs there
(ours)."""


@dataclass(slots=True)
class JobView:
    """One job."""

    spec: JobSpec
    machines: list[Machine]
    known: tuple[int, int] | None = None
    """Generation and step that the job's workflow knew to run when it was asked last: should no agent ever answer, or
    one know nothing of the job, that is noticed all the same."""
    known_ns: int = 0
    """When it was asked."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something new to judge at once."""
    reported: set[int] = field(default_factory=set)
    """Generations whose end the workflow was told of."""
    newest: dict[str, dict[int, int]] = field(default_factory=dict)
    """Machine → generation → newest sequence number of an observation."""
    _noted: dict[str, dict[int, tuple[str, asyncio.Future[None]]]] = field(default_factory=dict)
    """Machine → sequence number of what happened to it → of which job, and done once it is written down."""
    _ends: dict[int, dict[int, ObservedExit]] = field(default_factory=dict)
    """Generation → rank → end."""
    _shown: dict[int, Shown] = field(default_factory=dict)
    _newest: int = 0
    """Generation of a rank that was shown; 0: none was."""
    _heard: dict[str, int] = field(default_factory=dict)
    """Machine → when its agent said anything."""
    _launched: dict[str, int] = field(default_factory=dict)
    """Machine → newest generation that it showed."""
    _emptied: dict[str, int] = field(default_factory=dict)
    """Machine → the generation that it had shown before it knew the job no more."""
    _bare: set[str] = field(default_factory=set)
    """Machines that know nothing of the job."""
    _saves: set[int] = field(default_factory=set)
    """Ranks that were seen to save."""
    _begun: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Generation, rank) → completed steps when it was seen first."""
    _first: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Generation, rank) → steps when it was seen to step first, while others did not."""
    _stepping: set[int] = field(default_factory=set)
    """Generations of which every rank has completed a step."""
    _stepped: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Generation, rank) → when it was first seen to have completed a step."""
    _shift: dict[str, int] = field(default_factory=dict)
    """Machine → what makes its times the watcher's."""
    _stall: dict[int, StallRule] = field(default_factory=dict)
    _persist: dict[int, PersistRule] = field(default_factory=dict)
    _align: dict[int, AlignRule] = field(default_factory=dict)
    _drift: dict[int, DriftRule] = field(default_factory=dict)

    def ended(self, machine: str, observation: pb.Observation, now_ns: int) -> None:
        """A rank ended."""
        generation, rank = observation.generation, observation.rank_exited.rank
        known = self._ends.setdefault(generation, {}).get(rank)
        self._ends[generation][rank] = seen_of(
            observation, known.heard_ns if known else now_ns, shift_ns=self._shift.get(machine, 0)
        )
        self.newest.setdefault(machine, {})[generation] = observation.sequence
        self.woken.set()

    def ends(self, generation: int) -> int:
        """How many ranks of a generation have ended."""
        return len(self._ends.get(generation, ()))

    def showed(self, machine: str, reply: pb.ProgressReply, now_ns: int) -> None:
        """A machine showed where its ranks stand."""
        self._heard[machine] = now_ns
        self._shift[machine] = stream_shift_ns(reply.time_ns, now_ns)
        if reply.generation:
            self._launched[machine] = reply.generation
            self._emptied.pop(machine, None)
            self._bare.discard(machine)
        elif not reply.ranks:
            self._bare.add(machine)
            if machine in self._launched and machine not in self._emptied:
                self._emptied[machine] = self._launched[machine]
                self.woken.set()
        disk = StepsOnDisk(frozenset(), 0, 0, 0)
        for rank in reply.ranks:
            found = stored(rank.saved)
            disk = disk if found == disk else found
            self._newest = max(self._newest, rank.generation)
            self._shown[rank.rank] = Shown(machine, reply.time_ns, now_ns, rank, disk)
            self._begun.setdefault((rank.generation, rank.rank), rank.completed_steps)
            if rank.saved.own_step >= 0 and rank.HasField("saved"):
                self._saves.add(rank.rank)

    def runs(self, generation: int, step: int, now_ns: int) -> None:
        """The job's workflow knows a generation to run: all machines were launched, and a step was seen or waited for.

        Args:
            generation: the one that runs.
            step: where it began, or later.
            now_ns: when the workflow was asked.
        """
        self.known, self.known_ns = (generation, step), now_ns

    @property
    def has_bare(self) -> bool:
        """Whether a machine knows nothing of the job: not launched yet, or lost before it was seen to run."""
        return bool(self._bare)

    def noted(self, machine: str, observation: pb.Observation, written: asyncio.Future[None]) -> None:
        """Something happened to a machine itself; ``written`` is done once it is written down."""
        noted = self._noted.setdefault(machine, {})
        if observation.sequence < max(noted, default=0):
            noted.clear()  # its agent lost its log, and counts anew
        noted[observation.sequence] = observation.job, written

    def acknowledged(self, machine: str, whose: str, up_to: int) -> None:
        """The agent has forgotten what it was told is dealt with."""
        of, noted = "" if whose == OF_NO_JOB else whose, self._noted.get(machine, {})
        self._noted[machine] = {seq: one for seq, one in noted.items() if seq > up_to or one[0] != of}

    def dealt_with(self, machine: str, whose: str) -> int:
        """Newest observation of a machine that nobody need be told of any more; 0: none.

        Args:
            machine: Its name.
            whose: The job, or ``OF_NO_JOB``.
        """
        of = "" if whose == OF_NO_JOB else whose
        noted = {seq: written.done() for seq, (job, written) in self._noted.get(machine, {}).items() if job == of}
        newest = max(self.reported, default=0)
        reported = {} if whose == OF_NO_JOB else self.newest.get(machine, {})
        found = [seq for generation, seq in reported.items() if generation <= newest]
        missing = [seq for seq, is_written in noted.items() if not is_written]
        done = [seq for seq, is_written in noted.items() if is_written and whose == OF_NO_JOB]
        return min([max([*found, *done], default=0), *(seq - 1 for seq in missing)])

    def verdicts(self, now_ns: int) -> Iterator[Anomaly | Finished]:
        """What the job's workflow should be told, oldest generation first; each until it is in ``reported``."""
        world_size, policy = self.spec.topology().world_size, self.spec.policy
        for generation, ends in sorted(self._ends.items()):
            if generation not in self.reported:
                verdict = judge_exits(
                    generation,
                    list(ends.values()),
                    world_size=world_size,
                    now_ns=now_ns,
                    policy=policy,
                    others_in_loop=self._in_loop(generation, ends),
                )
                if verdict is not None:
                    yield verdict
        for judge in (self._lost, self._stalled, self._unsaved):
            anomaly = judge(now_ns)
            if anomaly is not None:
                yield anomaly

    def _in_loop(self, generation: int, ended: Container[int]) -> bool | None:
        """Whether a rank that lives is within ``run.steps``; False: all of them left it; None: nobody knows."""
        living = [one.rank for one in self._of(generation) if one.rank.alive and one.rank.rank not in ended]
        if any(rank.milestones.loop_entered and not has_left_loop(rank) for rank in living):
            return True
        return False if living and all(map(has_left_loop, living)) else None

    def persist(self, now_ns: int) -> int | None:
        """The step that all machines should be asked to write to disk, now; None: none."""
        generation = self._generation()
        if generation is None:
            return None
        rule = self._persist.get(generation)
        if rule is None:
            before = self._persist.get(max(self._persist, default=-1))
            rule = self._persist[generation] = before.next() if before else PersistRule(self.spec.checkpoint)
        shown = [one for one in self._of(generation) if one.rank.alive and one.rank.HasField("saved")]
        if len(shown) < self.spec.topology().world_size:
            return None  # of the others nobody knows what they have
        whole = newest_of_all(distinct(shown))
        return rule.observe([on_disk(one, now_ns) for one in shown], whole, now_ns)

    def on_disks(self) -> tuple[int, Agreed]:
        """What all machines should be told of each other's disks, and in which generation."""
        generation = self._generation()
        shown = self._of(generation) if generation else []
        if len(shown) < self.spec.topology().world_size:
            return generation or 0, Agreed()
        ranks = distinct(shown)
        return generation or 0, agree(ranks, len(ranks))

    def align(self, now_ns: int) -> tuple[int, Aligned] | None:
        """What all machines should be told of each other's backups, and in which generation; None: nothing."""
        generation, policy = self._generation(), self.spec.checkpoint
        if generation is None:
            return None
        shown = [one for one in self._of(generation) if one.rank.alive and one.rank.HasField("saved")]
        alone = not policy.backup or self.spec.machines == 1
        if alone and not all(one.rank.saved.backup_none for one in shown):
            return None  # an agent of an earlier release: without peers it aligns nothing
        apart = self._apart(generation, shown, now_ns)
        rule = self._align.setdefault(generation, AlignRule(self.spec.topology().world_size, policy.backup_every_steps))
        ranks = [
            Backed(
                rank=one.rank.rank,
                own_step=one.rank.saved.own_step,
                backup_step=kept_elsewhere(one.rank.saved),
                named=one.rank.saved.backup_named,
                whole=one.rank.saved.backup_whole,
                calm=one.rank.saved.backup_calm,
                failing=one.rank.saved.backup_problem != "",
                apart=one.rank.saved.apart,
            )
            for one in shown
        ]
        aligned = rule.observe(ranks, now_ns, apart=apart)
        return (generation, aligned) if aligned else None

    def _apart(self, generation: int, shown: list[Shown], now_ns: int) -> int:
        """How many steps ranks drift apart; 0: no more than their slots allow."""
        standing = [
            Standing(
                rank=one.rank.rank,
                own_step=one.rank.saved.own_step,
                completed_steps=one.rank.completed_steps,
                heard_ns=one.heard_ns,
            )
            for one in shown
        ]
        return self._drift.setdefault(generation, DriftRule(self.spec.checkpoint.slots)).observe(standing, now_ns)

    def _generation(self) -> int | None:
        """The newest one that was seen, unless it is dealt with."""
        newest = self._newest or (self.known[0] if self.known else None)
        return None if newest in self.reported else newest

    def _of(self, generation: int) -> list[Shown]:
        return [one for one in self._shown.values() if one.rank.generation == generation]

    def _lost(self, now_ns: int) -> Anomaly | None:
        """Machines that came back empty, without the ranks that they ran."""
        generation = self._generation()
        if not generation:
            return None
        topology = self.spec.topology()
        lost = {
            machine.name: topology.ranks(index)
            for index, machine in enumerate(self.machines)
            if self._emptied.get(machine.name) == generation or self._bare_in(generation, machine.name)
        }
        if not lost:
            return None
        rule = self._stall.get(generation)
        quiet_s = rule.quiet_s if rule else 0.0
        return loss_anomaly(generation, lost, job=self.spec.name, now_ns=now_ns, quiet_s=quiet_s)

    def _bare_in(self, generation: int, machine: str) -> bool:
        """Whether a machine knows nothing of the job after its workflow said that this generation runs there."""
        told = self.known is not None and self.known[0] == generation
        return told and machine in self._bare and self._heard[machine] > self.known_ns

    def _stalled(self, now_ns: int) -> Anomaly | None:
        generation = self._generation()
        if generation is None:
            return None
        shown = self._of(generation)
        counts = [one.steps for one in shown]
        if not counts:
            counts = [self.known[1]] if self.known and self.known[0] == generation else [0]
        elif not self._steps_go_on(generation, shown):
            self._stall.pop(generation, None)
            return None
        quiet_s = self._stall.setdefault(generation, StallRule(self.spec.policy)).observe(sum(counts), now_ns)
        if quiet_s is None:
            return None
        silent = [m.name for m in self.machines if now_ns - self._heard.get(m.name, -math.inf) > SILENT_S * 1e9]
        return stall_anomaly(
            generation, job=self.spec.name, quiet_s=quiet_s, step=max(counts), now_ns=now_ns, silent=silent
        )

    def _steps_go_on(self, generation: int, shown: list[Shown]) -> bool:
        """Whether steps are to be expected: the ranks are past their first one, and in their loops still.

        How long the first step may take is for who confirms the launch to say.
        """
        if all(has_left_loop(one.rank) for one in shown if one.rank.alive):
            return False
        if generation not in self._stepping:
            if all(one.stepped for one in shown):
                if len(shown) == self.spec.topology().world_size:
                    self._stepping.add(generation)
            elif max((self._ahead(one) for one in shown if one.stepped), default=0) < FREE:
                return False
        return True

    def _ahead(self, one: Shown) -> int:
        """Steps of a process since it was seen to step first; called at every look, so that this is known."""
        return one.steps - self._first.setdefault((one.rank.generation, one.rank.rank), one.steps)

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
                own_ns=one.ago_ns(one.rank.saved.own_age_s, one.rank.saved.own_ns),
                first_step_ns=self._first_step_ns(one),
                now_ns=one.heard_ns,
            )
            for one in self._of(generation)
            if one.rank.alive and one.rank.HasField("saved")
        ]
        return judge_saves(ranks, job=self.spec.name, generation=generation, policy=self.spec.checkpoint)

    def _first_step_ns(self, shown: Shown) -> int:
        """When a process completed its first step, by the watcher's clock: before it was seen to have, whatever the
        machine's clock says; 0: not yet."""
        rank = shown.rank
        if not rank.milestones.first_step:
            return 0
        seen_ns = self._stepped.setdefault((rank.generation, rank.rank), shown.heard_ns)
        return min(seen_ns, shown.ago_ns(0.0, rank.milestones.first_step))

    def _own_step(self, rank: pb.RankProgress) -> int:
        """Newest own save; where a rank that saved in an earlier generation has none yet, the step it began with."""
        if rank.saved.own_step < 0 and rank.rank in self._saves:
            return self._begun[rank.generation, rank.rank]
        return rank.saved.own_step
