"""A simulation of the eviction rules over recorded events: the evictions that they would have made, and their cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from everstep.decisions.act.evict.plan_evictions import EvictFacts, EvictPlan, plan_evictions
from everstep.decisions.blame.alerts import ALERTS_WITHIN_S, is_alert
from everstep.decisions.blame.silence import findings_of_silence
from everstep.model.eviction import Eviction, EvictMode
from everstep.model.finding import Finding, Health, MachineFinding
from everstep.model.message import Model
from everstep.model.recovery_policy import RecoveryPolicy

HOUR_NS = 3600e9
TOGETHER_S = 2.0
"""Events at most this far apart belong to one moment: the answers of machines that were asked together."""
STANDBY = "(not named)"
"""The name of a machine that the recording does not name."""


class RecordedEvent(Model):
    """The facts about one machine at one time: one line of a recording.

    A line has either all active findings (``findings``, as ``everstep machines --record``
    writes them, and each entry of its ``--json`` has them), or a finding that began or ended (``finding``), or how
    long agent and ranks have been silent (``silent_s``). A fact that a line leaves out has not changed.
    """

    machine: str = Field(min_length=1)
    time_ns: int = 0
    """The time of the facts; 0: ``now_ns`` is the time."""
    now_ns: int = 0
    findings: list[Finding] | None = None
    finding: Finding | None = None
    over: bool = False
    silent_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    """0: it is heard again."""
    stepping: bool | None = None
    """The machine's ranks step although its agent is silent."""
    problem: str = ""
    """Why the agent did not answer: then nothing is known, and the machine's findings do not change."""

    @property
    def at_ns(self) -> int:
        """The time of the facts; 0: the line has no time."""
        return self.time_ns or self.now_ns


class SimulatedEviction(Model):
    """A simulated eviction of one machine."""

    time_ns: int
    mode: EvictMode
    """``act``: evicted; ``approve``: an operator asked; ``shadow``: written down."""
    eviction: Eviction
    back_ns: int | None = None
    """When no finding against the evicted machine was active any more; None: not before the end."""


class Tripped(Model):
    """The breaker had an operator asked."""

    time_ns: int
    why: str


class Simulation(Model):
    """The evictions that a policy would have made over a recording."""

    events: int
    without_time: int = 0
    """Lines without a time, which are left out."""
    machines: int
    begin_ns: int = 0
    end_ns: int = 0
    done: list[SimulatedEviction] = Field(default_factory=list)
    tripped: list[Tripped] = Field(default_factory=list)

    def of(self, mode: EvictMode) -> list[SimulatedEviction]:
        """Return the simulated evictions of this mode, the oldest first."""
        return [eviction for eviction in self.done if eviction.mode is mode]

    @property
    def machines_out(self) -> int:
        """Return how many different machines would have been evicted."""
        return len({one.eviction.machine for one in self.of(EvictMode.ACT)})

    @property
    def hours(self) -> float:
        """Length of the recording."""
        return (self.end_ns - self.begin_ns) / HOUR_NS

    @property
    def machine_hours_out(self) -> float:
        """Return the machine hours that the evictions would have cost, each until the machine is healthy or the
        recording ends."""
        return sum(((one.back_ns or self.end_ns) - one.time_ns) / HOUR_NS for one in self.of(EvictMode.ACT))

    @property
    def machine_hours(self) -> float:
        """The hours of all machines over the whole recording."""
        return self.machines * self.hours

    def as_object(self) -> dict[str, Any]:
        """Everything, with the sums, as JSON has it."""
        sums = ("machines_out", "hours", "machine_hours_out", "machine_hours")
        return self.model_dump(mode="json") | {name: getattr(self, name) for name in sums}


@dataclass(slots=True)
class _Course:
    """The state of the simulation between two moments."""

    policy: RecoveryPolicy
    machines: tuple[str, ...]
    active: dict[str, dict[tuple[str, str, str], Finding]] = field(default_factory=dict)
    earlier: list[MachineFinding] = field(default_factory=list)
    silent: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Machine → how long it was silent, and when that was so."""
    stepping: set[str] = field(default_factory=set)
    out: dict[str, int] = field(default_factory=dict)
    """Evicted machine → its place in ``done``."""
    done: list[SimulatedEviction] = field(default_factory=list)
    told: set[tuple[EvictMode, str, str, str]] = field(default_factory=set)
    """Evictions that are pending with an operator, or noted, as long as their reason lasts."""
    tripped: list[Tripped] = field(default_factory=list)
    trips: bool = False

    def take(self, events: Sequence[RecordedEvent]) -> None:
        """Apply the events of one moment, and decide."""
        for event in events:
            self._learn(event)
            self._welcome_back(event)
        now_ns = events[-1].at_ns
        for machine in list(self.silent):  # silence grows as long as nothing is heard
            seconds, then_ns = self.silent[machine]
            self.silent[machine] = (seconds + (now_ns - then_ns) / 1e9, now_ns)
        self._note(now_ns, plan_evictions(self._facts(now_ns), self.policy))

    def _learn(self, event: RecordedEvent) -> None:
        active = self.active.setdefault(event.machine, {})
        before = dict(active)
        if event.findings is not None and not event.problem:
            active.clear()
            active.update((found.key, found) for found in event.findings)
        if event.finding and not event.over:
            active[event.finding.key] = event.finding
        elif event.finding and active.pop(event.finding.key, None) is None:
            for key in [key for key in active if key[1] == event.finding.reason]:  # its text names no part
                del active[key]
        self._remember(event, [found for key, found in before.items() if active.get(key) != found])
        if event.silent_s is not None:
            self.silent.pop(event.machine, None)
            if event.silent_s:
                self.silent[event.machine] = (event.silent_s, event.at_ns)
        elif not event.problem:
            self.silent.pop(event.machine, None)
        if event.stepping is not None:
            (self.stepping.add if event.stepping else self.stepping.discard)(event.machine)

    def _remember(self, event: RecordedEvent, over: Iterable[Finding]) -> None:
        """Network alerts that are over count for a while."""
        gone_ns = event.at_ns - 2 * ALERTS_WITHIN_S * 1e9
        kept = [one for one in self.earlier if one.finding.since_ns >= gone_ns]
        self.earlier = kept + [MachineFinding(machine=event.machine, finding=one) for one in over if is_alert(one)]

    def _welcome_back(self, event: RecordedEvent) -> None:
        """Return an evicted machine to the job once no finding against it is left."""
        found = self.active[event.machine].values()
        bad = event.machine in self.silent or any(one.verdict is Health.FAULTY or is_alert(one) for one in found)
        if event.machine in self.out and not bad:
            place = self.out.pop(event.machine)
            self.done[place] = self.done[place].model_copy(update={"back_ns": event.at_ns})

    def _facts(self, now_ns: int) -> EvictFacts:
        """A standby, of which nothing bad is known, is in the place of each evicted machine."""
        silent = {machine: seconds for machine, (seconds, _) in self.silent.items() if machine not in self.out}
        active = [
            MachineFinding(machine=machine, finding=finding)
            for machine, findings in self.active.items()
            if machine not in self.out
            for finding in findings.values()
        ]
        return EvictFacts(
            now_ns=now_ns,
            machines=self.machines,
            findings=[*active, *findings_of_silence(silent, self.policy, stepping=self.stepping - self.out.keys())],
            earlier=self.earlier,
            evicted_ns=[eviction.time_ns for eviction in self.done if eviction.mode is EvictMode.ACT],
        )

    def _note(self, now_ns: int, plan: EvictPlan) -> None:
        for one in plan.evict:
            self.out[one.machine] = len(self.done)
            self.done.append(SimulatedEviction(time_ns=now_ns, mode=EvictMode.ACT, eviction=one))
        held = [(EvictMode.APPROVE, eviction) for eviction in plan.ask] + [
            (EvictMode.SHADOW, eviction) for eviction in plan.shadow
        ]
        keys = {(mode, one.machine, one.rule, one.reason): (mode, one) for mode, one in held}
        for key, (mode, one) in keys.items():
            if key not in self.told:
                self.done.append(SimulatedEviction(time_ns=now_ns, mode=mode, eviction=one))
        self.told = set(keys)
        if plan.tripped and not self.trips:
            self.tripped.append(Tripped(time_ns=now_ns, why=plan.tripped))
        self.trips = bool(plan.tripped)


def simulate(events: Sequence[RecordedEvent], policy: RecoveryPolicy, *, machines: int = 0) -> Simulation:
    """Run the policy over recorded events, in the order of their times.

    A decision is made after every event, as if the job failed each time: the result is the largest possible number of
    evictions.

    Args:
        events: Events in any order; events of the same time keep their order.
        policy: The policy with the limits.
        machines: Machines of the job, if the recording does not have all of them.
    """
    timed = sorted((event for event in events if event.at_ns), key=lambda event: event.at_ns)
    named = tuple(dict.fromkeys(event.machine for event in timed))
    everybody = (*named, *(f"{STANDBY} {number}" for number in range(len(named), machines)))
    course = _Course(policy, everybody)
    for moment in _moments(timed):
        course.take(moment)
    return Simulation(
        events=len(timed),
        without_time=len(events) - len(timed),
        machines=len(everybody),
        begin_ns=timed[0].at_ns if timed else 0,
        end_ns=timed[-1].at_ns if timed else 0,
        done=course.done,
        tripped=course.tripped,
    )


def _moments(timed: Iterable[RecordedEvent]) -> Iterator[list[RecordedEvent]]:
    """The events that belong together: an incident, too, asks all machines at once."""
    moment: list[RecordedEvent] = []
    for event in timed:
        if moment and event.at_ns - moment[0].at_ns > TOGETHER_S * 1e9:
            yield moment
            moment = []
        moment.append(event)
    if moment:
        yield moment
