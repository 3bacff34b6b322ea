"""What the rules of eviction look at: the machines of one job, at one moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from everstep.model.diagnosis import is_tested
from everstep.model.hang import HangFound
from everstep.model.health import Finding, Health, MachineFinding, worst_first
from everstep.model.owner import Owner
from everstep.model.replay import is_replayed
from everstep.model.slow import SlowFound

FLAPS = frozenset({"nic-flap", "ib-port-flap"})
"""Reason codes of a link that went down and came back. Their verdict is unknown, since it may be the switch's fault; as
an alert each counts all the same (ByteRobust, figure 5)."""
REPEATED_FLAPS = frozenset({"nic-flap-repeated", "ib-port-flap-repeated"})
"""The monitor itself counted two of them on one link."""
ALERTS_WITHIN_S = 300.0
"""Network alerts of one machine that are not further apart count together (ByteRobust, figure 5: 5 minutes)."""
SHARED_MACHINES = 2
"""What more machines than these have at the same time may be shared."""
SHARED_SHARE = 0.5
"""It is, where more than this share of the job's machines have it."""


@dataclass(frozen=True, slots=True)
class EvictFacts:
    """What is known of the machines of one job now. The order of findings means nothing."""

    now_ns: int
    machines: tuple[str, ...]
    """Of the job, in order."""
    findings: tuple[MachineFinding, ...] = ()
    """What inspections say now."""
    earlier: tuple[MachineFinding, ...] = ()
    """What they said before; ``since_ns`` is when."""
    silent: Mapping[str, float] = field(default_factory=dict)
    """Machine → seconds since anything was heard from its agent; only machines whose ranks are silent too."""
    stepping: frozenset[str] = frozenset()
    """Machines whose ranks step although the agent is silent."""
    evicted_ns: tuple[int, ...] = ()
    """When machines of this job were evicted before without an operator: one entry for each machine."""
    hang: HangFound | None = None
    """What looks at the ranks of a job that stood still showed; None: nobody looked."""
    slow: SlowFound | None = None
    """What a vote over the ranks of a job that became slow said; None: there was none."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The same of one machine."""

    machine: str
    findings: tuple[Finding, ...]
    """What its inspections say now, the worst first."""
    alerts: tuple[Finding, ...]
    """Its network alerts, now and before, the oldest first; each of them once."""
    silent_s: float | None
    """Seconds since anything was heard from it, agent and ranks; None: it is heard."""
    stepping: bool
    machines: int
    """How many the job has."""
    hang: HangFound | None
    """That names it; None: none does."""
    slow: SlowFound | None
    """The same of a vote in which it was flagged most often."""
    alike: Mapping[str, int]
    """Reason code → how many machines of the job have such a fault, or such an alert, now."""

    def widespread(self, reason: str) -> str:
        """Why a reason is not of this machine but of something that many have in common; empty: it is its own.

        Ours: more than half of the machines, and more than two, at the same time.
        """
        count = self.alike.get(reason, 0)
        if count <= SHARED_MACHINES or count <= SHARED_SHARE * self.machines:
            return ""
        return f"{count} of {self.machines} machines have {reason} now: what they share is at fault, not each of them"


def is_sure(finding: Finding) -> bool:
    """Whether it names its machine with high confidence, and as the machine's own fault."""
    return finding.verdict is Health.FAULTY and finding.sure and finding.owner is Owner.MACHINE


def is_failed_test(finding: Finding) -> bool:
    """Whether a stop-time test says that the machine is at fault, and not what it shares with others."""
    return is_tested(finding) and finding.verdict is Health.FAULTY and finding.owner is Owner.MACHINE


def is_bad_link(finding: Finding) -> bool:
    """Whether a stop-time test says that the link between the machine and another one does not work."""
    return is_tested(finding) and finding.verdict is Health.FAULTY and finding.owner is Owner.NETWORK


def is_failed_replay(finding: Finding) -> bool:
    """Whether a replay of the job says that the machine is at fault."""
    return is_replayed(finding) and finding.verdict is Health.FAULTY and finding.owner is Owner.MACHINE


def is_alert(finding: Finding) -> bool:
    """Whether it is a network alert: a fault of the network, or a link that went down.

    What is merely counted, as lost packets, and does not say of which end it comes, is none; nor is what a test of the
    stopped job finds.
    """
    if is_tested(finding):
        return False
    seen_down = finding.reason in FLAPS or finding.reason in REPEATED_FLAPS
    faulty = finding.verdict is Health.FAULTY
    return finding.owner is Owner.NETWORK and (faulty or (seen_down and finding.verdict is Health.UNKNOWN))


def alerts_of(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The network alerts among findings, the oldest first, each of them once.

    An outage is told twice: as a fault while it lasts, and as a flap once the link is back. That is one alert, the
    first one.
    """
    found = {(one.since_ns, one.key): one for one in findings if is_alert(one)}
    alerts = [found[key] for key in sorted(found)]
    faults = [one for one in alerts if one.verdict is Health.FAULTY]
    return tuple(one for one in alerts if not (one.reason in FLAPS and any(_ends(one, fault) for fault in faults)))


def _ends(flap: Finding, fault: Finding) -> bool:
    same_part = (flap.inspection, flap.item) == (fault.inspection, fault.item)
    return same_part and 0 <= flap.since_ns - fault.since_ns <= ALERTS_WITHIN_S * 1e9


def each_machine(facts: EvictFacts) -> Iterator[MachineFacts]:
    """The machines of the job of which there is something to say, in the job's order."""
    now, before = _by_machine(facts.findings), _by_machine(facts.earlier)
    alike: dict[str, int] = defaultdict(int)
    for machine in facts.machines:
        for reason in {
            found.reason
            for found in now.get(machine, ())
            if any(counts(found) for counts in (is_sure, is_alert, is_failed_test, is_bad_link, is_failed_replay))
        }:
            alike[reason] += 1
    for machine in facts.machines:
        findings, silent_s, stepping = now.get(machine, []), facts.silent.get(machine), machine in facts.stepping
        hang = facts.hang if facts.hang and machine in facts.hang.machines else None
        slow = facts.slow if facts.slow and machine in facts.slow.suspects else None
        if not findings and silent_s is None and not stepping and hang is None and slow is None:
            continue
        yield MachineFacts(
            machine=machine,
            findings=tuple(findings),
            alerts=alerts_of([*findings, *before.get(machine, ())]),
            silent_s=silent_s,
            stepping=stepping,
            machines=len(facts.machines),
            hang=hang,
            slow=slow,
            alike=alike,
        )


def _by_machine(seen: Iterable[MachineFinding]) -> dict[str, list[Finding]]:
    """What was found, machine by machine, the worst first; what is told as healthy says nothing."""
    found: dict[str, list[Finding]] = defaultdict(list)
    for one in seen:
        if one.finding.verdict is not Health.HEALTHY:
            found[one.machine].append(one.finding)
    return {
        machine: worst_first(sorted(findings, key=lambda one: (one.text, one.evidence)))
        for machine, findings in found.items()
    }
