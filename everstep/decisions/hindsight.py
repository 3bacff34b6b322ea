"""What later events show about the verdicts of incidents: which were confirmed, and which were wrong.

A verdict is the owner that an incident acted on: the machine that it evicted, or the code that it rolled back. The
paper reports no such numbers. A verdict that later events do not decide stays open; nothing is assumed about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from everstep.model.finding import Owner

AGAIN_S = 86_400.0
"""A failure within this time after a rollback, seconds, counts as the same fault if it has the same cause."""
SUSPECTED = frozenset({"hang-culprit", "hang-group", "slow-machine", "failed-replay", "bad-link"})
"""Rules that evict a machine by what the job did, and not by what an inspection or a test of the machine found. Such a
verdict was wrong if the machine passes its tests afterwards. The rule for silent machines is not among them, since a
machine that was silent may be healthy later."""


class Hindsight(StrEnum):
    """What later events show about a verdict."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class PastIncident:
    """The facts about an incident that are compared with later events."""

    id: str
    job: str
    run: int
    at_ns: int
    """When the fault was noticed."""
    closed_ns: int | None
    owner: Owner
    """The owner of its fault."""
    resolution: str
    cause: str
    evicted: Mapping[str, str] = field(default_factory=dict)
    """Machine that was evicted without an operator's request → the rule."""
    faults: Sequence[tuple[str, str]] = ()
    """Machine and inspection of each finding that names a fault of a machine."""


@dataclass(frozen=True, slots=True)
class JudgedVerdict:
    """A verdict, and what later events show about it."""

    incident: PastIncident
    owner: Owner
    """The owner that the incident acted on."""
    hindsight: Hindsight
    why: str
    innocent: tuple[str, ...] = ()
    """Machines that were evicted, and that passed their tests afterwards or are innocent by a person's verdict."""

    @property
    def false_alarms(self) -> list[str]:
        """The inspections whose findings were wrong, once for each finding."""
        if self.hindsight is not Hindsight.REFUTED or self.owner is not Owner.MACHINE:
            return []
        return [inspection for _, inspection in self.incident.faults]


@dataclass(frozen=True, slots=True)
class LaterEvents:
    """The events that decide about verdicts."""

    now_ns: int
    incidents: Sequence[PastIncident]
    """The incidents of all jobs, oldest first."""
    returned: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Machine → when it returned to the pool because it passed its tests, nanoseconds."""
    decided: Mapping[tuple[int, str], Owner] = field(default_factory=dict)
    """Run and incident → the owner according to a person."""
    ended: Mapping[int, int] = field(default_factory=dict)
    """Run of a job that is over → when it ended, nanoseconds."""


def judged(events: LaterEvents) -> list[JudgedVerdict]:
    """Return what later events show about the verdict of each closed incident, oldest first."""
    return [_judged(one, events) for one in events.incidents if one.closed_ns is not None]


def verdict_of(incident: PastIncident) -> Owner:
    """Return the owner that an incident acted on."""
    if incident.evicted and incident.owner is not Owner.NETWORK:
        return Owner.MACHINE
    return Owner.CODE if incident.resolution == "rollback" else incident.owner


def _judged(incident: PastIncident, events: LaterEvents) -> JudgedVerdict:
    owner = verdict_of(incident)
    if (was := events.decided.get((incident.run, incident.id))) is not None:
        return _by_a_person(incident, owner, was)
    again, innocent = _evicted_again(incident, events), _passed(incident, events)
    if again:
        why = f"{', '.join(again)} was evicted again"
        return JudgedVerdict(incident, owner, Hindsight.CONFIRMED, why, innocent)
    if incident.evicted and len(innocent) == len(incident.evicted):
        why = f"{', '.join(innocent)} passed the tests after the eviction"
        return JudgedVerdict(incident, owner, Hindsight.REFUTED, why, innocent)
    if incident.resolution == "rollback":
        return JudgedVerdict(incident, owner, *_after_rollback(incident, events))
    return JudgedVerdict(incident, owner, Hindsight.OPEN, "", innocent)


def _by_a_person(incident: PastIncident, owner: Owner, was: Owner) -> JudgedVerdict:
    if was is Owner.UNKNOWN:
        return JudgedVerdict(incident, owner, Hindsight.OPEN, "a person could not tell the cause")
    right = was is owner
    innocent = () if right or was is Owner.MACHINE else tuple(sorted(incident.evicted))
    hindsight = Hindsight.CONFIRMED if right else Hindsight.REFUTED
    return JudgedVerdict(incident, owner, hindsight, f"a person decided that it was {was}", innocent)


def _evicted_again(incident: PastIncident, events: LaterEvents) -> list[str]:
    """Return the machines that were evicted again later; most incidents evict none, so no other one is looked at."""
    return sorted(
        machine
        for machine in incident.evicted
        if any(one.at_ns > incident.at_ns and machine in one.evicted for one in events.incidents)
    )


def _passed(incident: PastIncident, events: LaterEvents) -> tuple[str, ...]:
    """Return the suspected machines that passed their tests after this eviction, and before another one."""
    passed = []
    for machine, rule in sorted(incident.evicted.items()):
        later = (one.at_ns for one in events.incidents if one.at_ns > incident.at_ns and machine in one.evicted)
        until_ns = min(later, default=None)
        back = [time_ns for time_ns in events.returned.get(machine, ()) if time_ns > incident.at_ns]
        if rule in SUSPECTED and any(until_ns is None or time_ns < until_ns for time_ns in back):
            passed.append(machine)
    return tuple(passed)


def _after_rollback(incident: PastIncident, events: LaterEvents) -> tuple[Hindsight, str]:
    closed_ns = incident.closed_ns or incident.at_ns
    until_ns = closed_ns + AGAIN_S * 1e9
    for later in events.incidents:
        same_run = later.run == incident.run and later.id != incident.id
        if same_run and closed_ns <= later.at_ns <= until_ns and later.cause == incident.cause:
            return Hindsight.REFUTED, f"the older code failed in the same way: {later.id}"
    if events.now_ns >= until_ns or incident.run in events.ended:
        return Hindsight.CONFIRMED, "the older code did not fail in this way"
    return Hindsight.OPEN, ""
