"""A watcher's view of one job: the reports of its machines, as facts for the rules.

A new watcher gets the same view from the agents. There is no input or output here, and time is an argument.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from activities.watching.acknowledgements import Acknowledgements
from activities.watching.copy_rules import CopyRules
from activities.watching.shown import FirstShown, Shown, stored
from agent.reporting.observations import finding_of
from agent.state.rank_record import exit_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.hang.progress import HangCheck, HangSign
from everstep.decisions.clocks import stream_shift_ns
from everstep.decisions.detect.hang import bound_s
from everstep.decisions.detect.job_facts import FindingSeen, JobFacts, ObservedExit
from everstep.decisions.detect.machine_fault import PendingFaults, due
from everstep.decisions.detect.rank_ends import has_finished
from everstep.decisions.detect.rules import anomalies
from everstep.decisions.detect.slow_steps import SlowWatch
from everstep.decisions.detect.step_watch import StepWatch
from everstep.decisions.keep.align_backups import Aligned
from everstep.decisions.keep.disk_schedule import Agreed, StepsOnDisk
from everstep.decisions.keep.save_pace import PaceOrder
from everstep.decisions.notices import PacedJob
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.save_pace import SavePace

SILENT_S = 10.0
"""An agent that was silent for this long is named in a report of a hang, seconds; agents report every second."""
BARE_S = 5.0
"""While a machine does not know the job, the job's workflow is asked at this interval whether it runs there,
seconds."""

JUST_AFTER_S = 0.005
"""The margin after a time limit, so that the limit has certainly passed, seconds."""


class StepsSeen(NamedTuple):
    """The steps of a job that were seen."""

    generation: int
    total: int
    """The number of steps of all ranks together."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All ranks of a generation ended with success."""

    generation: int


@dataclass(slots=True)
class JobView:
    """The view of one job."""

    spec: JobSpec
    machines: list[Machine]
    known: tuple[int, int] | None = None
    """The generation and step that the job's workflow reported last. With them, a lost machine is noticed even if no
    agent answers, or if an agent does not know the job."""
    known_ns: int = 0
    """When the workflow answered last."""
    machines_of: int | None = None
    """The newest generation that is known to run on ``machines``; later generations may run on other machines. None:
    every generation runs on ``machines``."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something new to judge at once."""
    acknowledgements: Acknowledgements = field(default_factory=Acknowledgements)
    _exits: dict[int, dict[int, ObservedExit]] = field(default_factory=dict)
    """Generation → rank → its end."""
    _shown: dict[int, Shown] = field(default_factory=dict)
    """Rank → its latest view."""
    _first: dict[tuple[int, int], FirstShown] = field(default_factory=dict)
    """(Generation, rank) → its first view."""
    _newest: int = 0
    """The newest generation that a machine has shown; 0: there is none."""
    _last_heard_ns: dict[str, int] = field(default_factory=dict)
    """Machine → time of its agent's latest answer."""
    _launched: dict[str, int] = field(default_factory=dict)
    """Machine → newest generation that it showed."""
    _emptied: dict[str, int] = field(default_factory=dict)
    """Machine → generation that it showed before it lost the job."""
    _bare: set[str] = field(default_factory=set)
    """Machines that do not know the job."""
    _began_ns: int = 0
    """When the view was first evaluated; 0: not yet."""
    _saves: set[int] = field(default_factory=set)
    """Ranks that have saved a checkpoint."""
    _shift: dict[str, int] = field(default_factory=dict)
    """Machine → offset from its clock to the watcher's, nanoseconds."""
    _steps: dict[int, StepWatch] = field(default_factory=dict)
    """Generation → its step times, and how long it has not stepped."""
    _slow: SlowWatch = field(default_factory=SlowWatch)
    """How long the newest generation has stepped more slowly than before."""
    _slow_accepted_ns: int = 0
    """When the workflow last accepted a report that the job is slow; 0: never."""
    faults: PendingFaults = field(default_factory=PendingFaults)
    """Faults of the job's machines that the job's workflow has not accepted yet."""
    _stopped_ns: int = 0
    """When the workflow last accepted the end of a generation. The incident of that end asks the machines for all
    earlier findings."""
    others_answer: bool = False
    """The only machine of the job does not answer, and another machine of the cluster does."""
    latest: JobFacts | None = None
    """The latest facts of the newest generation."""
    _hang_check: tuple[StepsSeen, HangCheck] | None = None
    """The result of the latest samples, and the steps seen at that time."""
    _copies: CopyRules = field(init=False)
    _names: frozenset[str] = field(init=False)
    """The names of the job's machines."""

    def __post_init__(self) -> None:
        self._copies = CopyRules(self.spec)
        self._names = frozenset(machine.name for machine in self.machines)

    def continue_from(self, before: JobView) -> None:
        """Copy the typical times of steps and pauses from an earlier view, whose other data is not copied."""
        if before.spec == self.spec:
            self._steps = before._steps

    @property
    def reported(self) -> set[int]:
        """The generations whose end was reported to the job's workflow."""
        return self.acknowledgements.reported

    def ended(self, machine: str, observation: pb.Observation, now_ns: int) -> None:
        """Note the end of a rank."""
        generation, ended = observation.generation, observation.rank_ended
        known = self._exits.setdefault(generation, {}).get(ended.rank)
        self._exits[generation][ended.rank] = ObservedExit(
            id=observation.id,
            end=exit_of(machine, ended, shift_ns=self._shift.get(machine, 0)),
            finished=ended.finished,
            heard_ns=known.heard_ns if known else now_ns,
        )
        self.acknowledgements.ended(machine, observation)
        self.woken.set()

    def found(self, machine: str, observation: pb.Observation, now_ns: int) -> None:
        """Note an inspection's finding on a machine, or the end of a finding."""
        message = observation.machine_finding
        seen = FindingSeen(observation.id, machine, finding_of(message.finding), now_ns, observation.sequence)
        self.faults.note(seen, over=message.over)
        self._drop_collected_findings()

    def needs_no_more(self, machine: str) -> int | None:
        """Return the number up to which this job needs no event of a machine any more; None: the job does not run
        there."""
        if machine not in self._names:
            return None
        heard, first_pending = self.acknowledgements.heard(machine), self.faults.first(machine)
        # If the job is stopped, its incident asks the machines for their findings.
        is_stopped = self._newest in self.reported
        return heard if first_pending is None or is_stopped else min(heard, first_pending - 1)

    def accepted(self, anomaly: Anomaly, now_ns: int) -> None:
        """Note that the job's workflow has accepted an anomaly."""
        if anomaly.symptom is Symptom.MACHINE_FAULT:
            self.faults.accepted(anomaly, now_ns)
        elif anomaly.symptom is Symptom.SLOW:
            self._slow_accepted_ns = now_ns
        else:
            if anomaly.symptom is Symptom.HANG:
                self._learn_pause(anomaly.generation)
            self.reported.add(anomaly.generation)
            self._stopped_ns = now_ns
            self._drop_collected_findings()

    def _drop_collected_findings(self) -> None:
        """Drop findings that began before the accepted end of a generation: the stop of its incident collects them."""

        def began_ns(seen: FindingSeen) -> int:
            shift = self._shift.get(seen.machine)
            return seen.heard_ns if shift is None or not seen.finding.since_ns else seen.finding.since_ns + shift

        self.faults.drop(lambda seen: began_ns(seen) < self._stopped_ns)

    def ends(self, generation: int) -> int:
        """Return how many ranks of a generation have ended."""
        return len(self._exits.get(generation, ()))

    def showed(self, machine: str, reply: pb.ProgressReply, now_ns: int) -> None:
        """Note a machine's report of its ranks' progress."""
        self._last_heard_ns[machine] = now_ns
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
        if any(rank.generation > self._newest for rank in reply.ranks):
            self._forget_old()
        if any(rank.stopped for rank in reply.ranks):
            self.woken.set()
        disk = StepsOnDisk(frozenset(), 0, 0, 0)
        for rank in reply.ranks:
            steps = stored(rank.saved)
            disk = disk if steps == disk else steps
            self._newest = max(self._newest, rank.generation)
            if rank.HasField("saved") and rank.saved.own_step >= 0:
                self._saves.add(rank.rank)
            first = self._first.setdefault((rank.generation, rank.rank), FirstShown(rank.completed_steps))
            self._shown[rank.rank] = Shown(
                machine=machine,
                now_ns=reply.time_ns,
                heard_ns=now_ns,
                progress=rank,
                stored=disk,
                first=first,
                saved_before=rank.rank in self._saves,
            )

    def _forget_old(self) -> None:
        """Drop the data of reported generations, because a job runs for months with thousands of ranks."""
        newest = self._newest
        self._slow = SlowWatch()
        self._first = {key: first for key, first in self._first.items() if key[0] >= newest}
        self._steps = {generation: steps for generation, steps in self._steps.items() if generation >= newest}
        over = {generation for generation in self._exits if generation < newest and generation in self.reported}
        self._exits = {generation: exits for generation, exits in self._exits.items() if generation not in over}
        self._copies.forget_before(newest)

    def note_running(self, generation: int, step: int, now_ns: int) -> None:
        """Note that a generation runs, according to the job's workflow: its ranks were launched on all machines.

        Args:
            generation: The running generation.
            step: The step at which it began, or a later step.
            now_ns: The time of the workflow's answer, nanoseconds.
        """
        self.known, self.known_ns = (generation, step), now_ns

    @property
    def has_bare(self) -> bool:
        """Whether a machine does not know the job: the job is not launched there yet, or the machine lost it before its
        first report."""
        return bool(self._bare)

    @property
    def has_run(self) -> bool:
        """Whether a generation is known to have run."""
        return bool(self._newest or self.known)

    @property
    def quiet_s(self) -> float:
        """The time for which no rank has stepped, seconds; 0 while an incident is known."""
        steps = self._steps.get(self._generation() or 0)
        return steps.quiet_s if steps else 0.0

    @property
    def newer(self) -> int | None:
        """The newer generation that may run on other machines; None: there is none."""
        newest = max([self._newest, *self._exits])
        return newest if self.machines_of is not None and newest > self.machines_of else None

    def verdicts(self, now_ns: int) -> Iterator[Anomaly | Finished]:
        """Yield the reports for the job's workflow, oldest generation first. There are no more reports of a generation
        once the generation is in ``reported``."""
        newest, world_size = self._generation(), self.spec.topology().world_size
        sure = math.inf if self.machines_of is None else self.machines_of
        for generation in sorted({*self._exits, newest or 0} - self.reported - {0}):
            if generation > sure:
                return  # its missing ranks may be on machines that are not watched
            if has_finished(self._exits.get(generation, {}).values(), world_size):
                yield Finished(generation)
            facts = self.facts(generation, now_ns)
            for anomaly in anomalies(facts):
                if anomaly.symptom is Symptom.MACHINE_FAULT:
                    self.faults.offered(anomaly, due(facts))
                elif anomaly.symptom is Symptom.SLOW and self._is_slow_reported(now_ns):
                    continue
                yield anomaly

    def _is_slow_reported(self, now_ns: int) -> bool:
        """Return whether the workflow lately accepted a report that the job is slow. It has investigated that report,
        or is doing so now."""
        return (
            bool(self._slow_accepted_ns) and now_ns - self._slow_accepted_ns < self.spec.policy.slow.again_after_s * 1e9
        )

    def facts(self, generation: int, now_ns: int) -> JobFacts:
        """Return the facts for the rules. It must be called often, because it measures how long no rank has stepped."""
        exits, shown = self._exits.get(generation, {}), self._of(generation)
        ranks = [rank.facts for rank in shown]
        if generation != self._generation():
            return JobFacts(self.spec, generation, now_ns, exits, ranks, newest=False)
        steps = self._watch_of(generation)
        steps.observe(ranks, now_ns, known_step=self.known[1] if self.known and self.known[0] == generation else 0)
        self._slow.observe(ranks, now_ns)
        self.latest = JobFacts(
            self.spec,
            generation,
            now_ns,
            exits,
            ranks,
            quiet_s=steps.quiet_s,
            typical_step_s=steps.typical_step_s,
            longest_step_s=steps.longest_s,
            last_step=steps.last_step,
            slower_s=self._slow.slower_s,
            lost=self._lost(generation),
            silent=self.silent(now_ns),
            unheard_s=self._unheard_s(now_ns),
            others_answer=self.others_answer,
            findings=self.faults.all(),
            faults_accepted=self.faults.accepted_ns,
            hang_check=self._hang_check[1] if self._hang_check and self._hang_check[0] == self.steps_seen else None,
            machine_names=[machine.name for machine in self.machines],
        )
        return self.latest

    def _watch_of(self, generation: int) -> StepWatch:
        """Return the step times of a generation; a new generation starts with the step times of the previous one."""
        if generation not in self._steps:
            before = max((number for number in self._steps if number < generation), default=None)
            new = StepWatch(self.spec.topology().world_size)
            self._steps[generation] = new if before is None else self._steps[before].next_generation()
        return self._steps[generation]

    @property
    def steps_seen(self) -> StepsSeen:
        """The steps that were seen; the value changes with each step and each generation."""
        generation = self._generation() or 0
        steps = self._steps.get(generation)
        return StepsSeen(generation, steps.total if steps else 0)

    def sampled(self, seen: StepsSeen, hang_check: HangCheck) -> None:
        """Note the result of samples that were taken while no step was seen."""
        self._hang_check = (seen, hang_check)
        self.woken.set()

    def _learn_pause(self, generation: int) -> None:
        """Learn the pause of a generation that counts as hung although it waited for something outside of the job."""
        if self._hang_check is None or self._hang_check[0] != self.steps_seen:
            return
        if self.steps_seen.generation == generation and self._hang_check[1].sign is HangSign.OUTSIDE:
            self._steps[generation].learn_pause()

    def rest_s(self, longest_s: float, now_ns: int) -> float:
        """Return how long the facts need not be judged again, seconds: ``longest_s``, or less if the job counts as hung
        before that."""
        facts = self.latest
        if facts is None or not facts.quiet_s:
            return longest_s
        left_s = bound_s(facts) - facts.quiet_s - (now_ns - facts.now_ns) / 1e9
        return min(left_s + JUST_AFTER_S, longest_s) if left_s > 0 else longest_s

    @property
    def has_stopped_ranks(self) -> bool:
        """Whether the process of a rank was stopped in its latest view."""
        return any(shown.progress.stopped for shown in self._shown.values())

    def silent(self, now_ns: int) -> list[str]:
        """Return the machines whose agents were silent for ``SILENT_S``."""
        heard = self._last_heard_ns
        return [
            machine.name for machine in self.machines if now_ns - heard.get(machine.name, -math.inf) > SILENT_S * 1e9
        ]

    def _unheard_s(self, now_ns: int) -> dict[str, float]:
        """Return for how long each machine was silent, seconds."""
        heard, self._began_ns = self._last_heard_ns, self._began_ns or now_ns
        return {machine.name: (now_ns - heard.get(machine.name, self._began_ns)) / 1e9 for machine in self.machines}

    def persist(self, now_ns: int) -> int | None:
        """Return the step that all machines should now write to disk; None: no step."""
        generation = self._generation()
        return None if generation is None else self._copies.persist(generation, self._of(generation), now_ns)

    def on_disks(self) -> tuple[int, Agreed]:
        """Return the generation, and which steps are on the disks of all machines."""
        generation = self._generation() or 0
        return generation, self._copies.on_disks(self._of(generation))

    def align(self, now_ns: int) -> tuple[int, Aligned] | None:
        """Return the generation and which backups all machines should make; None: there is no change."""
        generation = self._generation()
        if generation is None:
            return None
        aligned = self._copies.align(generation, self._of(generation), now_ns)
        return (generation, aligned) if aligned else None

    def pace_saves(self) -> tuple[int, PaceOrder] | None:
        """Return the generation and the message about the pace of saves; None: there is no change."""
        generation = self._generation()
        order = None if generation is None else self._copies.pace_saves(self._of(generation))
        return None if generation is None or order is None else (generation, order)

    def paced(self) -> PacedJob | None:
        """Return the pace of the job's saves; None: it is not known, or its ranks have different paces now."""
        generation = self._generation()
        saves = [shown.progress.saves for shown in self._of(generation)] if generation is not None else []
        known = [one for one in saves if one.save_s and one.step_s]
        paces = {(one.pace.number, one.pace.every, one.pace.waits) for one in saves}
        if generation is None or len(known) < self.spec.topology().world_size or len(paces) != 1:
            return None
        slowest = max(known, key=lambda one: one.save_s / one.step_s)
        return PacedJob(self.spec.name, generation, SavePace(*paces.pop()), slowest.save_s, slowest.step_s)

    def _generation(self) -> int | None:
        """Return the newest generation that was seen; None: there is none, or its end was reported."""
        newest = self._newest or (self.known[0] if self.known else None)
        return None if newest in self.reported else newest

    def _of(self, generation: int) -> list[Shown]:
        return [shown for shown in self._shown.values() if shown.progress.generation == generation]

    def _lost(self, generation: int) -> dict[str, Sequence[int]]:
        """Return the machines that lost the job's state, with the ranks that they ran."""
        return {
            machine.name: ranks
            for machine, ranks in self.spec.assignment(self.machines).each()
            if self._emptied.get(machine.name) == generation or self._bare_in(generation, machine.name)
        }

    def _bare_in(self, generation: int, machine: str) -> bool:
        """Return whether a machine does not know the job after the workflow reported that this generation runs
        there."""
        runs = self.known is not None and self.known[0] == generation
        return runs and machine in self._bare and self._last_heard_ns[machine] > self.known_ns
