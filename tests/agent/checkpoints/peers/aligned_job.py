"""A job in simulated time, whose machines back up each other's rank. The rules are real, and the rest is a model.

One unit of time is a tenth of a second. Each machine has one rank. Its backup is on the next machine.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from agent.checkpoints.peers.align import apply, kept, lost, pending, pins, remember
from agent.checkpoints.saved_state import NONE
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.align_backups import HANG_S, HANG_STEPS, NO_NAMED_STEP, AlignRule, Backed
from everstep.decisions.keep.disk_schedule import StepRate
from everstep.decisions.keep.drift import DriftRule, RankPosition
from everstep.decisions.keep.next_copy import next_step_to_send, next_stride
from everstep.slots.file import by_need
from everstep.slots.format import EMPTY, Pin

UNIT_NS = 10**8
TICK = 5
"""The interval, in units, between two looks of a watcher and two reports of an agent."""


@dataclass
class Slots:
    """A checkpoint file: the steps that it holds. Room for a step is made by the rule of ``SlotFile``."""

    count: int
    held: list[int] = field(default_factory=list)
    pins: dict[Pin, int] = field(default_factory=dict)
    coming: int = -1
    """The step that is being written into another slot; -1: none."""

    def begin(self, step: int) -> None:
        self.coming = step
        steps = self.held + [EMPTY] * (self.count - len(self.held))
        self.held = [held for held in self.held if held != steps[by_need(steps, self.pins)[0]]]

    def commit(self) -> None:
        if self.coming >= 0:
            self.held.append(self.coming)
        self.coming = -1


class Machine:
    """A rank, its agent, and the rank's backup on its peer."""

    def __init__(self, rank: int, takes: Callable[[], int], *, slots: int, skew: int) -> None:
        self.rank = rank
        self.takes = takes
        """Returns how many units the next backup needs."""
        self.skew = skew
        self.own, self.backup = Slots(slots), Slots(2)
        self.own.begin(1)
        self.state = pb.SavedState(**NONE)
        self.sending = self.ready_at = -1
        self.stride = 1
        self.pace = StepRate()
        self.began_at = -1

    def spare(self) -> None:
        """Set the pins as ``PeerSender.spare`` does."""
        self.own.pins = dict(pins(self.state, self.sending, self.state.backup_step))

    def align(self, request: pb.AlignBackupsRequest) -> None:
        self.state.apart = request.apart
        apply(self.state, request)
        self.spare()

    def restart(self) -> None:
        """Restart the agent. It forgets what is not pinned, and a backup under way is given up."""
        self.state = pb.SavedState(**NONE)
        remember(self.state, dict.fromkeys(Pin, -1) | self.own.pins)
        self.state.own_step = max(self.own.held, default=-1)
        self.backup.coming = self.sending = -1
        self.stride = 1
        self.spare()

    def saved(self) -> None:
        self.own.commit()
        self.state.own_step = max(self.own.held)

    def work(self, now: int) -> None:
        """Send backups as ``PeerSender._send_what_is_due`` does."""
        if self.sending >= 0:
            if self.sending not in self.own.held:  # the rank overwrote the step meanwhile
                self.backup.coming = self.sending = -1
            elif now >= self.ready_at:
                self.backup.commit()
                kept(self.state, self.sending, 1)
                self.stride = next_stride(self.stride, 1, max(self.own.held) - self.began_at)
                self.sending = -1
            self.spare()
        self.pace.observe(now * UNIT_NS, max(self.own.held, default=-1))
        if self.sending < 0 and (step := self.choose(now)) is not None:
            newest = max(self.backup.held, default=-1)
            if step in self.backup.held or newest > step:
                kept(self.state, max(step, newest), 1)
                return
            keep = self.state.backup_whole
            if keep in self.backup.held:
                self.backup.held = [held for held in self.backup.held if held <= keep]
            self.backup.begin(step)
            self.sending, self.ready_at, self.began_at = step, now + self.takes(), max(self.own.held)
            self.spare()

    def choose(self, now: int) -> int | None:
        if named := pending(self.state):
            if named not in self.own.held and max(self.own.held, default=-1) > named:
                lost(self.state, named)
                self.spare()
            return named if named in self.own.held else None
        if self.state.backup_named != NO_NAMED_STEP:
            return None
        stride = 1 if self.pace.is_hung(now * UNIT_NS, HANG_S, HANG_STEPS) else self.stride
        return next_step_to_send({0: self.own.held}, {0: self.state.backup_step}, every=1, stride=stride)


class Job:
    """The model: machines, watchers, messages and a clock.

    Args:
        takes: For each machine, a function that returns how many units the next backup takes.
        pace: The number of units that a step takes.
        slower: For each machine, by how many units its steps are longer.
        meets: The number of steps after which fast ranks wait for slow ranks.
        watchers: The number of worker processes, each with a watcher.
        seed: Seed for delays, losses and skews.
    """

    def __init__(
        self,
        takes: Sequence[Callable[[], int]],
        *,
        pace: int,
        slower: Sequence[int] = (),
        meets: int = 1,
        watchers: int = 1,
        slots: int = 5,
        seed: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.paces = [pace + more for more in slower] or [pace] * len(takes)
        self.meets, self.slots = meets, slots
        self.now = 0
        self.machines = [
            Machine(rank, take, slots=slots, skew=self.random.randrange(min(self.paces)))
            for rank, take in enumerate(takes)
        ]
        self.delay, self.loss = 5, 0.0
        """The longest delay of a message, in units, and the share of messages that never arrive."""
        self.watchers = [self.watcher() for _ in range(watchers)]
        self.silent_until = 0
        self.stood = 0
        """The number of units in which no rank made progress."""
        self.whole = 0
        """The newest step that was reported as complete since machines were aligned."""
        self.freed = 0
        """Complete steps up to this one need not be kept, since machines were told to back up on their own again."""
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def watcher(self) -> tuple[AlignRule, DriftRule, dict[int, Backed], dict[int, RankPosition]]:
        """Return the state of a new watcher, which knows nothing yet."""
        return AlignRule(len(self.machines)), DriftRule(self.slots), {}, {}

    def completed(self, machine: Machine) -> int:
        """Return the number of steps that a rank has completed."""
        cycle, within = divmod(self.now - self.stood - machine.skew, self.meets * max(self.paces))
        return cycle * self.meets + min(within // self.paces[machine.rank], self.meets)

    def run(self, units: int, *, stands: bool = False) -> None:
        """Let time pass, and check in every unit that any machine may be lost.

        Args:
            units: The number of units.
            stands: Whether the ranks hang while everything else continues.
        """
        for _ in range(units):
            self.now += 1
            self.stood += stands
            while self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            for machine in self.machines:
                step = self.completed(machine)
                if step > 0 and step == machine.own.coming:
                    machine.saved()
                    machine.own.begin(step + 1)
                machine.work(self.now)
            if self.now % TICK == 0:
                self._show()
            self._watch()
            self.check()

    def check(self) -> None:
        """Check the law: without any one machine, all ranks can restore a step that is not older than ``whole``."""
        assert not self.whole or any(self.survives(step) for step in self.steps() if step >= self.whole), (
            f"at {self.now}, {self.whole} was whole: own {[m.own.held for m in self.machines]}, "
            f"backups {[m.backup.held for m in self.machines]}"
        )

    def steps(self) -> set[int]:
        return {step for machine in self.machines for step in machine.own.held}

    def survives(self, step: int) -> bool:
        """Return whether all ranks can restore a step, no matter which machine is lost."""
        return all(all(self._left(machine, step, gone) for machine in self.machines) for gone in self.machines)

    def _left(self, machine: Machine, step: int, gone: Machine) -> bool:
        peer = self.machines[(machine.rank + 1) % len(self.machines)]
        own = machine is not gone and step in machine.own.held
        return own or (peer is not gone and step in machine.backup.held)

    def _show(self) -> None:
        for machine, (_, _, shown, standing) in itertools.product(self.machines, self.watchers):
            state = machine.state
            backed = Backed(
                rank=machine.rank,
                own_step=state.own_step,
                backup_step=state.backup_step,
                named=state.backup_named,
                whole=state.backup_whole,
                calm=state.backup_calm,
                failing=False,
                apart=state.apart,
            )
            heard = (self.now + TICK) * UNIT_NS
            stands = RankPosition(machine.rank, state.own_step, self.completed(machine), heard)
            # Reports in a stream arrive late, but in order.
            self._later(TICK, partial(shown.__setitem__, backed.rank, backed))
            self._later(TICK, partial(standing.__setitem__, backed.rank, stands))

    def _watch(self) -> None:
        for number, (rule, drift, shown, standing) in enumerate(self.watchers):
            if self.now % TICK != number % TICK or self.now < self.silent_until:
                continue
            apart = drift.observe(standing.values(), self.now * UNIT_NS)
            found = rule.observe(list(shown.values()), self.now * UNIT_NS, apart=apart)
            if found is None:
                continue
            if found.named == NO_NAMED_STEP:
                self.whole, self.freed = 0, max(self.freed, found.settled)
            elif found.whole > self.freed:
                self.whole = max(self.whole, found.whole)
            request = pb.AlignBackupsRequest(
                whole=found.whole, settled=found.settled, named=found.named, apart=found.apart
            )
            for machine in self.machines:
                for _ in range(1 + (self.random.random() < self.loss)):  # some messages arrive twice
                    if self.random.random() >= self.loss:
                        self._later(self.random.randint(0, self.delay), partial(machine.align, request))

    def _later(self, units: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + units, next(self._order), act))
