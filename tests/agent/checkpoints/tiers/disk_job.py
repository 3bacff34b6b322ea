"""A model of a job in simulated time, whose machines have disks of different speeds. Only the rules are real code.

One unit of time is a tenth of a second. Each machine has one rank.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from activities.watching.job_view import JobView
from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.saved_state import SavedStates
from agent.checkpoints.tiers.retention import DiskRetention
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.next_copy import next_disk_step, stride_after
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec
from everstep.model.machine import Machine as Named

UNIT_NS = 10**8
TICK = 5
"""The interval, in units, between two looks of a watcher and two reports of an agent."""
MOST_ON_DISK = 5
"""The largest number of steps on a disk besides the newest ``disk_keep`` steps.

They are the settled step, the promised step, two open steps, and a step that is being written.
"""


class Machine:
    """A rank that saves every step into memory, and its agent, which writes some of these steps to disk."""

    def __init__(
        self, rank: int, takes: Callable[[], int], policy: CheckpointPolicy, world: int, shm: Path, offset_ns: int
    ) -> None:
        self.rank = rank
        self.takes = takes
        """Returns how many units the next file needs."""
        self.policy, self.world = policy, world
        self.shm = shm / f"m{rank}"
        self.offset_ns = offset_ns
        """The error of the machine's clock."""
        self.memory: list[int] = []
        self.disk: set[int] = set()
        self.saved_at: dict[int, int] = {}
        self.failing = self.unheard = False
        self.start()

    def start(self) -> None:
        """Start or restart the agent, which then knows only the files on disk and its own notes."""
        self.saved = SavedStates()
        self.retention = DiskRetention(Place("job", f"m{self.rank}", self.shm, self.shm, self.saved))
        options = pb.CheckpointOptions(disk_every_steps=self.policy.disk_every_steps, disk_keep=self.policy.disk_keep)
        topology = f"{self.world},1,1,1,pp-dp-tp"
        self.launch = LaunchOptions(1, 0, (self.rank,), options, topology=topology)
        self.done = max([*self.disk, self.retention.open(self.launch, self.disk) or -1])
        self.asked: set[int] = set()
        self.writing = self.ready_at = -1
        self.stride = 1
        self.began_at = -1

    def told(self, request: pb.PersistRequest) -> None:
        """Handle a request as ``JobTiers.persist`` and ``DiskWriter.persist`` do."""
        if self.unheard:
            return
        self.retention.agree(request)
        if request.step > self.done:
            self.asked.add(request.step)
            self.retention.named(request.step)

    def save(self, step: int, now: int) -> None:
        self.saved_at[step] = now
        self.memory = [one for one in self.memory if one == self.writing or one > step - 3] + [step]

    def work(self, now: int) -> None:
        """End and begin to write files, as ``DiskWriter._advance`` and ``_written`` do."""
        if self.writing >= 0 and self.writing not in self.asked and self.asked and self._choice(0) is not None:
            self._end()
        if self.writing >= 0 and now >= self.ready_at:
            step, newest = self.writing, max(self.memory)
            if not self.failing:
                self.disk.add(step)
                self.retention.wrote(step)
                lasted = newest - max(step, self.began_at)
                self.stride = stride_after(self.policy.disk_every_steps, lasted) if self._every() else 1
            self._end()
            if not self.failing:
                self.disk -= self.retention.old(self.launch, sorted(self.disk))
        if self.writing < 0 and (chosen := self._choice(self._every())) is not None:
            self.writing, self.began_at = chosen, max(self.memory)
            self.ready_at = now + self.takes()
            self.retention.passed(chosen - 1)

    def _every(self) -> int:
        return self.policy.disk_every_steps

    def _end(self) -> None:
        self.done = max(self.done, self.writing)
        self.asked.discard(self.writing)
        self.retention.passed(self.done)
        self.writing = -1

    def _choice(self, every: int) -> int | None:
        choice = next_disk_step(
            {self.rank: self.memory}, every=every, stride=self.stride, asked=self.asked, done=self.done
        )
        self.asked -= choice.gone.keys()
        return choice.step

    def shows(self, now: int) -> pb.ProgressReply:
        newest = max(self.disk, default=-1)
        saved = self.saved.of(self.rank)
        saved.own_step = max(self.memory, default=-1)
        saved.disk_step, saved.disk_wanted = newest, min(self.asked, default=-1)
        if newest >= 0:
            saved.disk_age_s = (now - self.saved_at[newest]) / 10
        shown = pb.RankProgress(rank=self.rank, generation=1, alive=True, completed_steps=saved.own_step, saved=saved)
        shown.milestones.forked = self.offset_ns + 1
        return pb.ProgressReply(time_ns=now * UNIT_NS + self.offset_ns, generation=1, ranks=[shown])


class Job:
    """The model: machines, watchers, messages and a clock.

    Args:
        takes: For each machine, a function that returns how many units the next file takes.
        pace: The number of units that a step takes.
        folder: Folder for the agents' notes.
        policy: The job's checkpoint policy.
        watchers: The number of worker processes, each with a watcher.
        seed: Seed for the delays and losses of messages.
        offsets_ns: The error of each machine's clock; missing ones are 0.
    """

    def __init__(
        self,
        takes: Sequence[Callable[[], int]],
        *,
        pace: int,
        folder: Path,
        policy: CheckpointPolicy,
        watchers: int = 1,
        seed: int = 0,
        offsets_ns: Sequence[int] = (),
    ) -> None:
        self.random = random.Random(seed)
        self.pace, self.policy = pace, policy
        self.now = self.step = 0
        self.names = [Named(name=f"m{rank}", address=f"127.0.0.1:{rank}") for rank in range(len(takes))]
        self.spec = JobSpec(name="job", script="/job.py", machines=len(takes), checkpoint=policy)
        offsets = [*offsets_ns, *[0] * len(takes)]
        self.machines = [
            Machine(rank, take, policy, len(takes), folder, offsets[rank]) for rank, take in enumerate(takes)
        ]
        self.delay, self.loss = 5, 0.0
        """The longest delay of a message, in units, and the share of messages that never arrive."""
        self.watchers = [self.watcher() for _ in range(watchers)]
        self.silent_until = 0
        self.asked: list[tuple[int, int]] = []
        """Requests of watchers to write a step: (time, step)."""
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def watcher(self) -> JobView:
        """Return a new watcher's view, which knows nothing yet."""
        return JobView(self.spec, self.names)

    def run(self, units: int) -> None:
        """Let time pass, and check the law in every unit."""
        for _ in range(units):
            self.now += 1
            while self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            if self.now % self.pace == 0:
                self.step += 1
            for machine in self.machines:
                if self.now % self.pace == 0:
                    machine.save(self.step, self.now)
                machine.work(self.now)
            if self.now % TICK == 0:
                self._show()
            self._watch()
            self.check()

    @property
    def common(self) -> int:
        """The newest step that all machines have on disk; 0: none."""
        return max(set.intersection(*(machine.disk for machine in self.machines)), default=0)

    @property
    def settled(self) -> int:
        """The newest step that some machine knows as settled, which means that all machines keep it."""
        return max(machine.saved.of(machine.rank).disk_settled for machine in self.machines)

    def check(self) -> None:
        """Check the law: all machines have a step that is not older than the settled step, and no disk has too many."""
        disks = [sorted(machine.disk) for machine in self.machines]
        assert self.common >= self.settled, f"at {self.now}, {self.settled} was settled: disks {disks}"
        most = self.policy.disk_keep + MOST_ON_DISK
        assert all(len(disk) <= most for disk in disks), f"at {self.now}, more than {most} steps: disks {disks}"

    def _show(self) -> None:
        for machine in self.machines:
            if not machine.unheard:
                reply = machine.shows(self.now)
                for watched in self.watchers:
                    # Reports in a stream arrive late, but in order.
                    self._later(TICK, partial(self._hear, watched, f"m{machine.rank}", reply))

    def _hear(self, watched: JobView, machine: str, reply: pb.ProgressReply) -> None:
        watched.showed(machine, reply, self.now * UNIT_NS)

    def _watch(self) -> None:
        for number, watched in enumerate(self.watchers):
            if self.now % TICK != number % TICK or self.now < self.silent_until:
                continue
            for request in self._said(watched):
                for machine in self.machines:
                    for _ in range(1 + (self.random.random() < self.loss)):  # some messages arrive twice
                        if self.random.random() >= self.loss:
                            self._later(self.random.randint(0, self.delay), partial(machine.told, request))

    def _said(self, watched: JobView) -> Iterator[pb.PersistRequest]:
        """Yield a watcher's request as ``Watcher._persist`` does, but at every look."""
        step = watched.persist(self.now * UNIT_NS)
        generation, agreed = watched.on_disks()
        if step:
            self.asked.append((self.now, step))
        yield pb.PersistRequest(
            step=step or 0,
            whole=agreed.keep,
            generation=generation,
            settled=agreed.settled,
            gone=agreed.gone,
        )

    def _later(self, units: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + units, next(self._order), act))
