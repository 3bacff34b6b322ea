"""The detection of a machine that an inspection reports as faulty while its ranks run.

The job continues, and an incident reports the fault. If ranks end first, the finding is evidence in the incident about
their end. If many machines report a fault at the same time, e.g. since a switch fails, they are one anomaly.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from everstep.decisions.blame.alerts import is_alert
from everstep.decisions.blame.shared_fault import is_shared
from everstep.decisions.detect.job_facts import FindingSeen, JobFacts, Rule
from everstep.model.finding import Finding, FindingSource, Health, MachineFinding, Remedy
from everstep.model.incident import Anomaly, Symptom
from everstep.model.pool import OperatorMove

FINDINGS_KEPT = 100
"""The largest number of pending findings of a machine; further findings would show nothing new."""
WAIT_S = 1.0
"""If a fault ends a rank, it does so within this time, seconds. Then the incident about the end has the fault too."""
GATHER_S = 10.0
"""Faults of the same reason on several machines are gathered for this long, seconds, and reported together."""
LATELY_S = 60.0
"""Faults within this time, seconds, after a fault of the same reason was reported are gathered too."""
FINDINGS_WHOLE = 64
"""The number of findings of one anomaly that have evidence. The others have none, and are left out if most machines
share the fault, since such a fault evicts no machine."""
OF_A_MACHINE = 4
"""The number of findings about one machine that are listed beside them."""
EVIDENCE_OF_OTHERS = 1
"""The number of lines of evidence that each of them after the first keeps."""


class PendingFaults:
    """The faults of a job's machines that its workflow has not accepted yet."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[tuple[str, str, str], FindingSeen]] = defaultdict(dict)
        """Machine → subject of a finding → the active finding."""
        self._offered: dict[str, set[str]] = {}
        """Id of the newest anomaly that reports findings → ids of their observations."""
        self.accepted_ns: dict[str, int] = {}
        """Reason code → when the job's workflow last accepted such a fault."""
        self.known: Mapping[str, int] = {}
        """Subject of a fault → when the job's workflow last accepted it, nanoseconds of the wall clock."""

    def note(self, seen: FindingSeen, *, over: bool) -> None:
        """Note a finding of an inspection, or the end of a finding if ``over`` is set.

        A link that went down and up again is no fault, but it is reported too: the second such alert evicts.

        A finding that was active when the stream began may have been reported before any watcher was connected.
        """
        if over or not is_reported(seen.finding):
            self._seen[seen.machine].pop(seen.finding.key, None)
        elif seen.sequence or not self._is_known(seen):
            self._keep(seen)

    def _is_known(self, seen: FindingSeen) -> bool:
        about = MachineFinding(machine=seen.machine, finding=seen.finding).about
        return seen.finding.key in self._seen[seen.machine] or self.known.get(about, -1) >= seen.finding.since_ns

    def offered(self, anomaly: Anomaly, faults: Iterable[FindingSeen]) -> None:
        """Note which faults an anomaly reports."""
        self._offered = {anomaly.id: {seen.id for seen in faults}}

    def accepted(self, anomaly: Anomaly, now_ns: int) -> None:
        """Note that the job's workflow accepted an anomaly: the faults that it reports are not pending any more."""
        self.accepted_ns |= {found.finding.reason: now_ns for found in anomaly.findings}
        self.known = {**self.known, **{found.about: found.finding.since_ns for found in anomaly.findings}}
        gone = self._offered.get(anomaly.id, {anomaly.id})
        self.drop(lambda seen: seen.id in gone)

    def drop(self, is_gone: Callable[[FindingSeen], bool]) -> None:
        """Drop faults that need not be reported."""
        for machine, findings in self._seen.items():
            self._seen[machine] = {key: seen for key, seen in findings.items() if not is_gone(seen)}

    def first(self, machine: str) -> int | None:
        """Return the number of a machine's oldest observation with a pending fault; None: there is none."""
        return min((seen.sequence for seen in self._seen[machine].values() if seen.sequence), default=None)

    def all(self) -> list[FindingSeen]:
        """Return all pending faults, in the order of their arrival."""
        found = [seen for findings in self._seen.values() for seen in findings.values()]
        return sorted(found, key=lambda seen: seen.heard_ns)

    def _keep(self, seen: FindingSeen) -> None:
        known = self._seen[seen.machine]
        if seen.finding.key in known or len(known) < FINDINGS_KEPT:
            known[seen.finding.key] = seen


def is_reported(finding: Finding) -> bool:
    """Return whether the job's workflow has to know a finding: it is a fault or a network alert."""
    return finding.verdict is Health.FAULTY or is_alert(finding)


def due(facts: JobFacts) -> list[FindingSeen]:
    """Return the faults to report now, which all have one reason code; empty: none."""
    if not facts.newest or facts.exits or facts.lost:
        return []
    groups: dict[str, list[FindingSeen]] = defaultdict(list)
    for seen in facts.findings:
        if is_reported(seen.finding) and facts.now_ns - seen.heard_ns >= WAIT_S * 1e9:
            groups[seen.finding.reason].append(seen)
    for reason, group in groups.items():
        reported_ns = facts.faults_accepted.get(reason)
        lately = reported_ns is not None and facts.now_ns - reported_ns < LATELY_S * 1e9
        gathers = lately or len({seen.machine for seen in group}) > 1
        if not gathers or facts.now_ns - group[0].heard_ns >= GATHER_S * 1e9:
            return group
    return []


def find_machine_fault(facts: JobFacts) -> Anomaly | None:
    """Return one anomaly of the first fault that was not reported yet, and of the other faults of its reason."""
    group = sorted(due(facts), key=lambda seen: (seen.machine, seen.finding.key))
    if not group:
        return None
    findings = [MachineFinding(machine=seen.machine, finding=seen.finding) for seen in group]
    machines = sorted({seen.machine for seen in group})
    others = findings[FINDINGS_WHOLE:] if not is_shared(len(machines), facts.spec.machines) else []
    listed = [
        findings[0],
        *(_shortened(other, EVIDENCE_OF_OTHERS) for other in findings[1:FINDINGS_WHOLE]),
        *(_shortened(other, 0) for other in _few_of_each(others)),
    ]
    return Anomaly(
        id=_id(group),
        generation=facts.generation,
        symptom=Symptom.MACHINE_FAULT,
        headline=_headline(findings[0], len(findings), len(machines)),
        machines=machines,
        seen_ns=min(seen.finding.since_ns for seen in group),
        findings=listed,
        more_findings=len(findings) - len(listed),
        alike={findings[0].finding.reason: len(machines)},
    )


def without(anomaly: Anomaly, reported: Collection[str]) -> Anomaly | None:
    """Return the anomaly without faults that were reported before; None: all of them were.

    Args:
        anomaly: The anomaly of faulty machines.
        reported: The subjects of the faults that were reported before (``MachineFinding.about``).
    """
    new = [fault for fault in anomaly.findings if fault.about not in reported]
    if len(new) == len(anomaly.findings):
        return anomaly
    if not new:
        return None
    left_out = {fault.machine for fault in anomaly.findings} - {fault.machine for fault in new}
    machines = [machine for machine in anomaly.machines if machine not in left_out]
    headline = _headline(new[0], len(new) + anomaly.more_findings, len(machines))
    return anomaly.model_copy(update={"findings": new, "machines": machines, "headline": headline})


def _id(group: Sequence[FindingSeen]) -> str:
    """Return an id that is equal only for watchers that gathered the same findings: the job accepts each id once."""
    if len(group) == 1:
        return group[0].id
    digest = hashlib.sha256(" ".join(seen.id for seen in group).encode()).hexdigest()[:12]
    return f"{group[0].id}-and-{len(group) - 1}-more-{digest}"


def _headline(first: MachineFinding, findings: int, machines: int) -> str:
    if findings == 1:
        return first.headline
    more = f"{findings - 1} more such {'fault' if findings == 2 else 'faults'}"
    return f"{first.headline}, and {more}" + (f", on {machines} machines together" if machines > 1 else "")


def _few_of_each(findings: Iterable[MachineFinding]) -> Iterator[MachineFinding]:
    """Return the first findings of each machine."""
    seen: Counter[str] = Counter()
    for about in findings:
        seen[about.machine] += 1
        if seen[about.machine] <= OF_A_MACHINE:
            yield about


def _shortened(about: MachineFinding, lines: int) -> MachineFinding:
    """Return a finding with some lines of its evidence; without any, it has no text either."""
    fewer = {"evidence": about.finding.evidence[:lines]} | ({} if lines else {"text": ""})
    finding = about.finding.model_copy(update=fewer)
    return about.model_copy(update={"finding": finding})


def operator_anomaly(move: OperatorMove, generation: int, now_ns: int) -> Anomaly:
    """Return the anomaly by which an operator evicts a machine from a running job."""
    finding = Finding(
        inspection=FindingSource.OPERATOR,
        source=FindingSource.OPERATOR,
        reason="operator-evict",
        text=f"evicted by {move.operator}" + (f": {move.reason}" if move.reason else ""),
        remedy=Remedy.NOTHING,
        sure=True,
        since_ns=now_ns,
    )
    about = MachineFinding(machine=move.machine, finding=finding)
    return Anomaly(
        id=f"{finding.reason}-{move.machine}-{now_ns}",
        generation=generation,
        symptom=Symptom.MACHINE_FAULT,
        headline=about.headline,
        machines=[move.machine],
        seen_ns=now_ns,
        findings=[about],
    )


MACHINE_FAULT = Rule(
    name="machine-fault",
    finds="an inspection reports a machine as faulty, and its ranks run",
    threshold="1 s after the finding, 10 s if several machines have it; an incident reports it, and the job continues",
    source="ByteRobust, section 4.1: inspections",
    find=find_machine_fault,
)
