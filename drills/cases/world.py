"""The machines of a case and what is broken in them, in simulated time.

Faults strike here: ranks end or hang, machines become silent, inspections report findings. No code here decides what to
do about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from activities.activity import Activity
from drills.cases.case import Case, CaseFault
from drills.cases.temporal import Perform, S, SimulatedTemporal
from everstep.decisions.blame.classify.first_cause import classification
from everstep.decisions.detect.job_facts import ObservedExit
from everstep.model.evidence import RankExit
from everstep.model.finding import Finding, MachineFinding
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

JOB = "case"
BEGAN_NS = 1_800_000_000 * S
"""The time of the wall clock when a case begins, nanoseconds."""
NOTICED_S = 0.05
"""The time from the end of a rank until the watcher knows it."""
LOST_S = 0.2
"""The time until other ranks lose their connections to a rank that ended."""
TICK_S = 1.0
"""The time between two looks at something that may change, seconds."""
ALL = "all"
CONNECTION_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:5512"


@dataclass(eq=False)
class Broken:
    """A fault of the case, on one machine, and how often it has struck."""

    fault: CaseFault
    machine: str
    strikes: int = 0
    first_ns: int = 0
    version: int = 0
    """The version of the code that ran when it struck first."""


@dataclass(eq=False)
class Generation:
    """The ranks of one launch."""

    number: int
    resume_step: int
    machines: list[Machine]
    version: int
    launched_ns: int
    loop_ns: int
    """When the ranks are in their loops. After a pause, this time is moved by the length of the pause."""
    frozen_ns: int = 0
    """Since when no rank steps; 0: the ranks step."""
    stopped: bool = False
    """The ranks were killed."""
    ends: dict[int, ObservedExit] = field(default_factory=dict)
    dying_until_ns: dict[int, int] = field(default_factory=dict)
    """Rank → when its killed process is gone."""
    hung: dict[int, CaseFault] = field(default_factory=dict)
    """Rank that hangs → the fault with which it hangs."""

    @property
    def names(self) -> list[str]:
        """The names of its machines, in order."""
        return [machine.name for machine in self.machines]


class World:
    """The machines of a case.

    Args:
        case: The case.
        workflows: The classes of workflows.
        activities: The classes of activities.
        perform: Begins an activity.
    """

    def __init__(
        self, case: Case, workflows: tuple[type, ...], activities: tuple[type[Activity[object]], ...], perform: Perform
    ) -> None:
        self.case = case
        job = case.job
        names = [f"m{number}" for number in range(job.machines + job.standbys)]
        self.machines = [Machine(name=name, address=f"10.0.0.{number}:1") for number, name in enumerate(names)]
        self.spec = JobSpec(
            name=JOB,
            script="/job.py",
            machines=job.machines,
            ranks_per_machine=job.ranks_per_machine,
            tp=job.tp,
            pp=job.pp,
            policy=job.policy,
        )
        self.world_size = job.machines * job.ranks_per_machine
        self.broken = [Broken(fault, machine) for fault in case.fault for machine in self._struck(fault)]
        self.temporal = SimulatedTemporal(workflows, activities, perform, BEGAN_NS)
        self.generation: Generation | None = None
        self.first_step_ns = 0
        """When the job completed its first step; 0: not yet."""
        self.computed_again = 0
        """Steps that were computed again, over all launches."""
        self.silent_ns: dict[str, int] = {}
        """Machine that does not answer → since when."""
        self.findings: list[MachineFinding] = []
        """What inspections report now."""
        self.observers: list[Callable[[], None]] = []
        """Called whenever something may have changed."""
        self.last_ns = 0
        """When something happened to the machines last, nanoseconds."""
        self._coming: list[int] = []
        """When something will happen to the machines, nanoseconds, in order."""

    def _struck(self, fault: CaseFault) -> Iterator[str]:
        if fault.machine == ALL:
            yield from (f"m{number}" for number in range(self.case.job.machines))
        else:
            yield fault.machine or f"m{fault.rank // self.case.job.ranks_per_machine}"

    # Time.

    def at(self, after_s: float, what: Callable[[], None]) -> None:
        """Let something happen to the machines after a time, seconds."""
        due_ns = self.temporal.now_ns + round(max(after_s, 0.0) * S)
        self._coming = sorted([*self._coming, due_ns])

        def happen() -> None:
            self._coming.pop(0)
            self.last_ns = self.temporal.now_ns
            what()

        self.temporal.at(after_s, happen, fixed=True)

    @property
    def next_s(self) -> float | None:
        """The time until something happens to the machines, seconds; None: nothing will."""
        return (self._coming[0] - self.temporal.now_ns) / S if self._coming else None

    def skip(self, duration_s: float) -> None:
        """Let the job train for a time, seconds, in which nothing happens."""
        self.temporal.skip(duration_s)

    def changed(self) -> None:
        """Call all observers, since something may have changed."""
        for observe in list(self.observers):
            observe()

    # The ranks.

    def is_silent(self, machine: str) -> bool:
        """Return whether a machine does not answer."""
        return machine in self.silent_ns

    @property
    def cut_off(self) -> bool:
        """Whether no machine answers, the standbys neither."""
        return all(self.is_silent(machine.name) for machine in self.machines)

    def home(self, rank: int) -> str:
        """Return the machine of a rank of the newest generation."""
        assert self.generation is not None
        return self.generation.names[rank // self.case.job.ranks_per_machine]

    def completed(self) -> int:
        """Return the number of steps that the ranks have completed."""
        generation, now_ns = self.generation, self.temporal.now_ns
        if generation is None:
            return 0
        until_ns = min(generation.frozen_ns or now_ns, now_ns)
        done = (until_ns - generation.loop_ns) / (self.case.job.step_s * S)
        return max(generation.resume_step, 0) + max(int(done + 1e-6), 0)

    def stepped(self) -> int:
        """Return the number of steps that the newest generation has completed."""
        return self.completed() - max(self.generation.resume_step, 0) if self.generation else 0

    def launch(self, number: int, resume_step: int, machines: list[Machine], version: int) -> None:
        """Start the ranks of a generation."""
        if self.generation is not None:
            self.computed_again += max(self.completed() - max(resume_step, 0), 0)
        now_ns, job = self.temporal.now_ns, self.case.job
        self.generation = generation = Generation(
            number, resume_step, machines, version, launched_ns=now_ns, loop_ns=now_ns + round(job.start_s * S)
        )
        first_s = job.start_s + job.step_s

        def stepped() -> None:
            if generation is self.generation and not generation.frozen_ns:
                if not self.first_step_ns:
                    self.first_step_ns = self.temporal.now_ns
                self.changed()

        self.temporal.at(first_s, stepped)
        for broken in self.broken:
            if broken.strikes and self._lasts(broken):
                self._strike_again(broken, generation, first_s + broken.fault.again_s)

    def stop(self) -> None:
        """Kill the ranks."""
        generation = self.generation
        if generation is not None and not generation.stopped:
            generation.frozen_ns = generation.frozen_ns or self.temporal.now_ns
            generation.stopped = True

    # What is broken.

    def begin_faults(self) -> None:
        """Let each fault strike at its time, from now on."""
        for broken in self.broken:
            self.at(broken.fault.at_s, lambda broken=broken: self._strike_first(broken))  # type: ignore[misc]

    def _strike_first(self, broken: Broken) -> None:
        generation = self.generation
        needs_ranks = broken.fault.ends_rank or broken.fault.hangs
        if needs_ranks and (generation is None or generation.stopped or generation.frozen_ns):
            self.at(TICK_S, lambda: self._strike_first(broken))
            return
        self._strike(broken)

    def _strike_again(self, broken: Broken, generation: Generation, after_s: float) -> None:
        def strike() -> None:
            going_on = generation is self.generation and not generation.frozen_ns and not generation.stopped
            if going_on and self._lasts(broken):
                self._strike(broken)

        self.at(max(after_s, NOTICED_S), strike)

    def _lasts(self, broken: Broken) -> bool:
        """Return whether a fault that has struck can strike again."""
        fault, generation = broken.fault, self.generation
        if fault.times and broken.strikes >= fault.times:
            return False
        if fault.for_s and fault.ends_rank:
            return self.temporal.now_ns <= broken.first_ns + fault.for_s * S
        match fault.lasts:
            case "machine":
                return generation is not None and broken.machine in generation.names
            case "code":
                return generation is not None and generation.version == broken.version
            case "always":
                return True
            case _:
                return broken.strikes < fault.times

    def _strike(self, broken: Broken) -> None:
        fault, generation, now_ns = broken.fault, self.generation, self.temporal.now_ns
        assert generation is not None
        if not broken.strikes:
            broken.first_ns, broken.version = now_ns, generation.version
        broken.strikes += 1
        if fault.finding is not None:
            self.at(fault.finding.after_s, lambda: self._find(broken))
        if fault.silent:
            self._silence(broken)
        if broken.machine in generation.names:
            self._strike_ranks(broken, generation)
        self.changed()

    def _strike_ranks(self, broken: Broken, generation: Generation) -> None:
        fault, now_ns = broken.fault, self.temporal.now_ns
        if fault.ends_rank or fault.hangs or fault.silent:
            generation.frozen_ns = generation.frozen_ns or now_ns
        each = self.case.job.ranks_per_machine
        first = generation.names.index(broken.machine) * each + (0 if fault.machine else fault.rank % each)
        for rank in range(self.world_size) if fault.every_rank else [first]:
            if fault.dying_s:
                generation.dying_until_ns[rank] = now_ns + round(fault.dying_s * S)
            if fault.ends_rank:
                self._end(generation, rank, fault)
            elif fault.hangs:
                generation.hung[rank] = fault
        if fault.hangs and fault.for_s:
            self.at(fault.for_s, lambda: self._go_on(generation))
        if fault.ends_rank and fault.others == "connection lost":
            self.at(LOST_S, lambda: self._lose_connections(generation))

    def _end(self, generation: Generation, rank: int, fault: CaseFault) -> None:
        if generation.stopped or rank in generation.ends:
            return
        code = None if fault.signal else 1 if fault.exit is None else fault.exit
        end = RankExit(
            rank=rank,
            machine=self.home(rank),
            pid=1000 + rank,
            code=code,
            signal=fault.signal or None,
            time_ns=self.temporal.now_ns,
            completed_steps=self.completed(),
            exception=fault.raises,
            log_tail=fault.log,
            shown_steps=self.stepped(),
            classification=classification(fault.raises, fault.log, -fault.signal if fault.signal else code),
        )

        def noticed() -> None:
            id = f"{end.machine}-{generation.number}-{rank}"
            generation.ends.setdefault(rank, ObservedExit(id, end, finished=False, heard_ns=self.temporal.now_ns))
            self.changed()

        self.at(NOTICED_S, noticed)

    def _lose_connections(self, generation: Generation) -> None:
        for rank in range(self.world_size):
            self._end(generation, rank, CaseFault(raises=CONNECTION_LOST))

    def _go_on(self, generation: Generation) -> None:
        """Let ranks that hang continue."""
        if not generation.stopped:
            generation.loop_ns += self.temporal.now_ns - generation.frozen_ns
            generation.frozen_ns, generation.hung = 0, {}
            self.changed()

    def _silence(self, broken: Broken) -> None:
        self.silent_ns.setdefault(broken.machine, self.temporal.now_ns)
        if broken.fault.for_s:
            self.at(broken.fault.for_s, lambda: self._come_back(broken.machine))

    def _come_back(self, machine: str) -> None:
        self.silent_ns.pop(machine)
        if self.generation is not None and self.generation.frozen_ns and not self.generation.ends:
            self._go_on(self.generation)
        self.changed()

    def _find(self, broken: Broken) -> None:
        given = broken.fault.finding
        assert given is not None
        finding = Finding(
            inspection=given.inspection,
            source=given.source,
            reason=given.reason,
            verdict=given.verdict,
            item=given.item,
            text=given.text or given.reason,
            owner=given.owner,
            sure=given.sure,
            since_ns=self.temporal.now_ns,
        )
        found = MachineFinding(machine=broken.machine, finding=finding)
        if found.about in {one.about for one in self.findings}:
            return
        self.findings.append(found)
        if given.for_s:
            self.at(given.for_s, lambda: self.findings.remove(found))
        self.changed()
