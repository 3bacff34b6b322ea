"""Simulates the eviction rules on recorded events: which machines the rules would have evicted, and at what cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from everstep.decisions.act.evict.plan_evictions import EvictFacts, EvictPlan, counts, plan_evictions
from everstep.decisions.blame.alerts import ALERTS_WITHIN_S, is_alert
from everstep.decisions.blame.silence import findings_of_silence
from everstep.model.eviction import Eviction, EvictMode
from everstep.model.finding import Finding, Health, MachineFinding
from everstep.model.message import Model
from everstep.model.recovery_policy import RecoveryPolicy

HOUR_NS = 3600e9
TOGETHER_S = 2.0
"""Events that are at most this many seconds apart are decided on together, since their machines were asked together."""
UNRECORDED = "(not named)"
"""The name of a machine that the recording does not name."""


class RecordedEvent(Model):
    """One line of a recording: the facts about one machine at one time.

    A line has all active findings (``findings``), or one finding that began or ended (``finding``), or how long the
    agent and the ranks have been silent (``silent_s``). ``everstep machines --record`` writes the first kind, and the
    entries of ``everstep machines --json`` are lines too. A fact that a line leaves out has not changed.
    """

    machine: str = Field(min_length=1)
    time_ns: int = 0
    """The time of the facts; 0: ``now_ns`` is the time."""
    now_ns: int = 0
    findings: list[Finding] | None = None
    finding: Finding | None = None
    over: bool = False
    silent_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    """How long the agent and the ranks have been silent, seconds; 0: they answer again."""
    stepping: bool | None = None
    """The machine's ranks step although its agent is silent."""
    problem: str = ""
    """Why the agent did not answer; if it is set, the machine's findings do not change."""

    @property
    def at_ns(self) -> int:
        """The time of the facts; 0: the line has no time."""
        return self.time_ns or self.now_ns


class SimulatedEviction(Model):
    """A simulated eviction of one machine."""

    time_ns: int
    mode: EvictMode
    """``act``: the machine is evicted; ``approve``: an operator is asked; ``shadow``: the eviction is only noted."""
    eviction: Eviction
    back_ns: int | None = None
    """When the last finding against the evicted machine was over; None: not before the end of the recording."""


class Tripped(Model):
    """The breaker asked an operator."""

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
        return len({evicted.eviction.machine for evicted in self.of(EvictMode.ACT)})

    @property
    def hours(self) -> float:
        """The length of the recording, hours."""
        return (self.end_ns - self.begin_ns) / HOUR_NS

    @property
    def machine_hours_out(self) -> float:
        """Return the machine hours that the evictions would have cost. Each eviction lasts until the machine is healthy
        or the recording ends."""
        return sum(((out.back_ns or self.end_ns) - out.time_ns) / HOUR_NS for out in self.of(EvictMode.ACT))

    @property
    def machine_hours(self) -> float:
        """The hours of all machines over the whole recording."""
        return self.machines * self.hours

    def as_object(self) -> dict[str, Any]:
        """Return all fields and the sums, for JSON."""
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
    """Silent machine → how many seconds it had been silent, and at which time (nanoseconds)."""
    stepping: set[str] = field(default_factory=set)
    out: dict[str, int] = field(default_factory=dict)
    """Evicted machine → its index in ``done``."""
    done: list[SimulatedEviction] = field(default_factory=list)
    pending: set[tuple[EvictMode, str, str, str]] = field(default_factory=set)
    """Evictions that wait for an operator, or are only noted, and whose reason still lasts."""
    tripped: list[Tripped] = field(default_factory=list)
    trips: bool = False

    def apply(self, events: Sequence[RecordedEvent]) -> None:
        """Apply the events of one moment, and decide."""
        for event in events:
            self._update_findings(event)
            self._return_healthy(event)
        now_ns = events[-1].at_ns
        for machine in list(self.silent):  # a machine stays silent until a later line ends its silence
            seconds, then_ns = self.silent[machine]
            self.silent[machine] = (seconds + (now_ns - then_ns) / 1e9, now_ns)
        self._record(now_ns, plan_evictions(self._facts(now_ns), self.policy))

    def _update_findings(self, event: RecordedEvent) -> None:
        active = self.active.setdefault(event.machine, {})
        before = dict(active)
        if event.findings is not None and not event.problem:
            active.clear()
            active.update((finding.key, finding) for finding in event.findings)
        if event.finding and not event.over:
            active[event.finding.key] = event.finding
        elif event.finding and active.pop(event.finding.key, None) is None:
            # If a line ends a finding without naming the part, all findings with this reason are over.
            for key in [key for key in active if key[1] == event.finding.reason]:
                del active[key]
        self._keep_alerts(event, [finding for key, finding in before.items() if active.get(key) != finding])
        if event.silent_s is not None:
            self.silent.pop(event.machine, None)
            if event.silent_s:
                self.silent[event.machine] = (event.silent_s, event.at_ns)
        elif not event.problem:
            self.silent.pop(event.machine, None)
        if event.stepping is not None:
            (self.stepping.add if event.stepping else self.stepping.discard)(event.machine)

    def _keep_alerts(self, event: RecordedEvent, over: Iterable[Finding]) -> None:
        """Keep network alerts that are over, since they still count for a while."""
        oldest_ns = event.at_ns - 2 * ALERTS_WITHIN_S * 1e9
        kept = [alert for alert in self.earlier if alert.finding.since_ns >= oldest_ns]
        self.earlier = kept + [MachineFinding(machine=event.machine, finding=one) for one in over if is_alert(one)]

    def _return_healthy(self, event: RecordedEvent) -> None:
        """Return an evicted machine to the job once no finding against it is left."""
        active = self.active[event.machine].values()
        bad = event.machine in self.silent or any(one.verdict is Health.FAULTY or is_alert(one) for one in active)
        if event.machine in self.out and not bad:
            index = self.out.pop(event.machine)
            self.done[index] = self.done[index].model_copy(update={"back_ns": event.at_ns})

    def _facts(self, now_ns: int) -> EvictFacts:
        """Return the facts of the job, in which a healthy standby replaces each evicted machine."""
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
            evicted_ns=[one.time_ns for one in self.done if one.mode is EvictMode.ACT and counts(one.eviction)],
        )

    def _record(self, now_ns: int, plan: EvictPlan) -> None:
        for eviction in plan.evict:
            self.out[eviction.machine] = len(self.done)
            self.done.append(SimulatedEviction(time_ns=now_ns, mode=EvictMode.ACT, eviction=eviction))
        pending = {
            (mode, eviction.machine, eviction.rule, eviction.reason): eviction
            for mode, evictions in ((EvictMode.APPROVE, plan.ask), (EvictMode.SHADOW, plan.shadow))
            for eviction in evictions
        }
        for key, eviction in pending.items():
            if key not in self.pending:
                self.done.append(SimulatedEviction(time_ns=now_ns, mode=key[0], eviction=eviction))
        self.pending = set(pending)
        if plan.tripped and not self.trips:
            self.tripped.append(Tripped(time_ns=now_ns, why=plan.tripped))
        self.trips = bool(plan.tripped)


def simulate(events: Sequence[RecordedEvent], policy: RecoveryPolicy, *, machines: int = 0) -> Simulation:
    """Run the policy on recorded events, in the order of their times.

    The rules decide after every moment, as if the job failed each time. So the result is the largest possible number
    of evictions.

    Args:
        events: Events in any order; events of the same time keep their order.
        policy: The policy with the limits.
        machines: The number of machines of the job, if the recording does not have all of them.
    """
    timed = sorted((event for event in events if event.at_ns), key=lambda event: event.at_ns)
    named = tuple(dict.fromkeys(event.machine for event in timed))
    all_machines = (*named, *(f"{UNRECORDED} {number}" for number in range(len(named), machines)))
    course = _Course(policy, all_machines)
    for moment in _moments(timed):
        course.apply(moment)
    return Simulation(
        events=len(timed),
        without_time=len(events) - len(timed),
        machines=len(all_machines),
        begin_ns=timed[0].at_ns if timed else 0,
        end_ns=timed[-1].at_ns if timed else 0,
        done=course.done,
        tripped=course.tripped,
    )


def _moments(timed: Iterable[RecordedEvent]) -> Iterator[list[RecordedEvent]]:
    """Group the events of machines that were asked together, as an incident asks all machines at once."""
    moment: list[RecordedEvent] = []
    for event in timed:
        if moment and event.at_ns - moment[0].at_ns > TOGETHER_S * 1e9:
            yield moment
            moment = []
        moment.append(event)
    if moment:
        yield moment
