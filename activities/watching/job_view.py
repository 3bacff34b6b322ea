"""What a watcher knows of one job: what its machines showed, as facts for the rules.

All of it can be learned again from the agents. No input or output here; time is
an argument.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from activities.agents.convert import exit_of
from activities.watching.acknowledgements import Acknowledgements
from activities.watching.copy_rules import CopyRules
from activities.watching.pending_faults import PendingFaults
from activities.watching.shown import FirstShown, Shown, stored
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.hang.progress import HangCheck
from everstep.decisions.clocks import stream_shift_ns
from everstep.decisions.detect.hang import bound_s
from everstep.decisions.detect.job_facts import FindingSeen, JobFacts, ObservedExit
from everstep.decisions.detect.machine_fault import due
from everstep.decisions.detect.rank_ends import has_finished
from everstep.decisions.detect.rules import anomalies
from everstep.decisions.detect.slow_steps import SlowWatch
from everstep.decisions.detect.step_watch import StepWatch
from everstep.decisions.keep.align_backups import Aligned
from everstep.decisions.keep.disk_schedule import Agreed, StepsOnDisk
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

SILENT_S = 10.0
"""An agent that said nothing for this long, although it speaks every second, is named in a report of a hang."""
BARE_S = 5.0
"""While a machine says that it does not know the job, the job's workflow is asked this often whether it runs there."""

JUST_AFTER_S = 0.005
"""Then a time is over for certain."""


class StepsSeen(NamedTuple):
    """Which steps of a job were seen."""

    generation: int
    total: int
    """Of all ranks together."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All ranks of a generation left with success."""

    generation: int


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
    machines_of: int | None = None
    """Up to this generation the job is known to run on ``machines``: a later one may be on others. None: any is."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something new to judge at once."""
    acknowledgements: Acknowledgements = field(default_factory=Acknowledgements)
    _exits: dict[int, dict[int, ObservedExit]] = field(default_factory=dict)
    """Generation → rank → end."""
    _shown: dict[int, Shown] = field(default_factory=dict)
    """Rank → what was shown of it last."""
    _first: dict[tuple[int, int], FirstShown] = field(default_factory=dict)
    """(Generation, rank) → what was shown of it first."""
    _newest: int = 0
    """Generation of a rank that was shown; 0: none was."""
    _last_heard_ns: dict[str, int] = field(default_factory=dict)
    """Machine → when its agent said anything."""
    _launched: dict[str, int] = field(default_factory=dict)
    """Machine → newest generation that it showed."""
    _emptied: dict[str, int] = field(default_factory=dict)
    """Machine → the generation that it had shown before it knew the job no more."""
    _bare: set[str] = field(default_factory=set)
    """Machines that know nothing of the job."""
    _began_ns: int = 0
    """When it was looked first; 0: not yet."""
    _saves: set[int] = field(default_factory=set)
    """Ranks that were seen to save."""
    _shift: dict[str, int] = field(default_factory=dict)
    """Machine → what makes its times the watcher's."""
    _steps: dict[int, StepWatch] = field(default_factory=dict)
    """Generation → how long it has not stepped."""
    _slow: SlowWatch = field(default_factory=SlowWatch)
    """How long the newest generation has stepped more slowly than before."""
    _slow_accepted_ns: int = 0
    """When that was told last; 0: never."""
    faults: PendingFaults = field(default_factory=PendingFaults)
    """Of its machines, that its workflow was not told."""
    _stopped_ns: int = 0
    """When the end of a generation was told last: its incident asks the machines for what they had found by then."""
    latest: JobFacts | None = None
    """What the rules looked at last, of the newest generation."""
    _hang_check: tuple[StepsSeen, HangCheck] | None = None
    """What looks at the ranks showed, and at which steps."""
    _copies: CopyRules = field(init=False)
    _names: frozenset[str] = field(init=False)
    """Of its machines."""

    def __post_init__(self) -> None:
        self._copies = CopyRules(self.spec)
        self._names = frozenset(machine.name for machine in self.machines)

    def goes_on_from(self, before: JobView) -> None:
        """Take over how long steps and pauses were; what another run had is of other generations."""
        if before.spec == self.spec:
            self._steps = before._steps

    @property
    def reported(self) -> set[int]:
        """Generations whose end was reported to the job's workflow."""
        return self.acknowledgements.reported

    def ended(self, machine: str, observation: pb.Observation, now_ns: int) -> None:
        """A rank ended."""
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
        """An inspection found something on a machine, or what it had found is over."""
        self.faults.found(machine, observation, now_ns)
        self._drop_those_of_the_incident()

    def needs_no_more(self, machine: str) -> int | None:
        """Newest of what happened to a machine itself that may be forgotten as far as this job goes, with all before
        it; None: the job does not run there."""
        if machine not in self._names:
            return None
        heard, untold = self.acknowledgements.heard(machine), self.faults.first(machine)
        # Of a job that is stopped, the incident asks the machines what they find.
        is_stopped = self._newest in self.reported
        return heard if untold is None or is_stopped else min(heard, untold - 1)

    def accepted(self, anomaly: Anomaly, now_ns: int) -> None:
        """The job's workflow knows of an anomaly."""
        if anomaly.symptom is Symptom.MACHINE_FAULT:
            self.faults.accepted(anomaly, now_ns)
        elif anomaly.symptom is Symptom.SLOW:
            self._slow_accepted_ns = now_ns
        else:
            self.reported.add(anomaly.generation)
            self._stopped_ns = now_ns
            self._drop_those_of_the_incident()

    def _drop_those_of_the_incident(self) -> None:
        """What was found before the end of a generation was told is among what its incident's stop finds."""

        def began_ns(seen: FindingSeen) -> int:
            shift = self._shift.get(seen.machine)
            return seen.heard_ns if shift is None or not seen.finding.since_ns else seen.finding.since_ns + shift

        self.faults.drop(lambda seen: began_ns(seen) < self._stopped_ns)

    def ends(self, generation: int) -> int:
        """How many ranks of a generation have ended."""
        return len(self._exits.get(generation, ()))

    def showed(self, machine: str, reply: pb.ProgressReply, now_ns: int) -> None:
        """A machine showed where its ranks stand."""
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
        """Of generations that are dealt with nothing is needed: a job lives for months, with thousands of ranks."""
        newest = self._newest
        self._slow = SlowWatch()
        self._first = {key: first for key, first in self._first.items() if key[0] >= newest}
        self._steps = {generation: steps for generation, steps in self._steps.items() if generation >= newest}
        over = {generation for generation in self._exits if generation < newest and generation in self.reported}
        self._exits = {generation: exits for generation, exits in self._exits.items() if generation not in over}
        self._copies.forget_before(newest)

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

    @property
    def has_run(self) -> bool:
        """Whether a generation is known to have run."""
        return bool(self._newest or self.known)

    @property
    def quiet_s(self) -> float:
        """How long no rank has stepped, seconds; 0 while an incident is known."""
        steps = self._steps.get(self._generation() or 0)
        return steps.quiet_s if steps else 0.0

    @property
    def newer(self) -> int | None:
        """A generation that was seen, and may be on other machines; None: there is none."""
        newest = max([self._newest, *self._exits])
        return newest if self.machines_of is not None and newest > self.machines_of else None

    def verdicts(self, now_ns: int) -> Iterator[Anomaly | Finished]:
        """What to report to the job's workflow, oldest generation first; each until it is in ``reported``."""
        newest, world_size = self._generation(), self.spec.topology().world_size
        sure = math.inf if self.machines_of is None else self.machines_of
        for generation in sorted({*self._exits, newest or 0} - self.reported - {0}):
            if generation > sure:
                return  # what is missing of it may be on machines that are not watched
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
        """Whether the job's workflow was told lately that it is slow: it looked into it, or does."""
        return (
            bool(self._slow_accepted_ns) and now_ns - self._slow_accepted_ns < self.spec.policy.slow.again_after_s * 1e9
        )

    def facts(self, generation: int, now_ns: int) -> JobFacts:
        """What the rules look at. Call it often: how long nothing happened is known from looking."""
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
            findings=self.faults.all(),
            faults_accepted=self.faults.accepted_ns,
            hang_check=self._hang_check[1] if self._hang_check and self._hang_check[0] == self.steps_seen else None,
            machine_names=[machine.name for machine in self.machines],
        )
        return self.latest

    def _watch_of(self, generation: int) -> StepWatch:
        """Of a generation's steps; of a new one the time that a step and a pause took in the one before are known."""
        if generation not in self._steps:
            before = max((one for one in self._steps if one < generation), default=None)
            new = StepWatch(self.spec.topology().world_size)
            self._steps[generation] = new if before is None else self._steps[before].begun_anew()
        return self._steps[generation]

    @property
    def steps_seen(self) -> StepsSeen:
        """Which steps were seen: it changes with each, and with each generation."""
        generation = self._generation() or 0
        steps = self._steps.get(generation)
        return StepsSeen(generation, steps.total if steps else 0)

    def looked_at(self, seen: StepsSeen, hang_check: HangCheck) -> None:
        """Samples of the ranks showed this, while no step was seen."""
        self._hang_check = (seen, hang_check)
        self.woken.set()

    def rest_s(self, longest_s: float, now_ns: int) -> float:
        """How long nothing is to be judged anew, as far as time alone decides: at most until the job counts as hung."""
        facts = self.latest
        if facts is None or not facts.quiet_s:
            return longest_s
        left_s = bound_s(facts) - facts.quiet_s - (now_ns - facts.now_ns) / 1e9
        return min(left_s + JUST_AFTER_S, longest_s) if left_s > 0 else longest_s

    @property
    def has_stopped_ranks(self) -> bool:
        """Whether the process of a rank was stopped when it was shown last."""
        return any(shown.progress.stopped for shown in self._shown.values())

    def silent(self, now_ns: int) -> list[str]:
        """Machines whose agents said nothing for ``SILENT_S``."""
        heard = self._last_heard_ns
        return [one.name for one in self.machines if now_ns - heard.get(one.name, -math.inf) > SILENT_S * 1e9]

    def _unheard_s(self, now_ns: int) -> dict[str, float]:
        """Since when machines were not heard."""
        heard, self._began_ns = self._last_heard_ns, self._began_ns or now_ns
        return {one.name: (now_ns - heard.get(one.name, self._began_ns)) / 1e9 for one in self.machines}

    def persist(self, now_ns: int) -> int | None:
        """The step that all machines should be asked to write to disk, now; None: none."""
        generation = self._generation()
        return None if generation is None else self._copies.persist(generation, self._of(generation), now_ns)

    def on_disks(self) -> tuple[int, Agreed]:
        """What to tell all machines of each other's disks, and in which generation."""
        generation = self._generation() or 0
        return generation, self._copies.on_disks(self._of(generation))

    def align(self, now_ns: int) -> tuple[int, Aligned] | None:
        """What to tell all machines of each other's backups, and in which generation; None: nothing."""
        generation = self._generation()
        if generation is None:
            return None
        aligned = self._copies.align(generation, self._of(generation), now_ns)
        return (generation, aligned) if aligned else None

    def _generation(self) -> int | None:
        """The newest one that was seen, unless it is dealt with."""
        newest = self._newest or (self.known[0] if self.known else None)
        return None if newest in self.reported else newest

    def _of(self, generation: int) -> list[Shown]:
        return [shown for shown in self._shown.values() if shown.progress.generation == generation]

    def _lost(self, generation: int) -> dict[str, Sequence[int]]:
        """Machines that came back empty, with the ranks that they ran."""
        return {
            machine.name: ranks
            for machine, ranks in self.spec.assignment(self.machines).each()
            if self._emptied.get(machine.name) == generation or self._bare_in(generation, machine.name)
        }

    def _bare_in(self, generation: int, machine: str) -> bool:
        """Whether a machine knows nothing of the job after its workflow said that this generation runs there."""
        runs = self.known is not None and self.known[0] == generation
        return runs and machine in self._bare and self._last_heard_ns[machine] > self.known_ns
