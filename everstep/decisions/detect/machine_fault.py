"""The detection of a machine that an inspection reports as faulty while its ranks continue.

The job continues, and an incident reports the fault. If ranks end meanwhile, the incident of their end has the finding
among its evidence. Faults that many machines report at the same time, as when a switch fails, are one anomaly.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Sequence

from everstep.decisions.detect.job_facts import FindingSeen, JobFacts, Rule
from everstep.model.finding import Finding, FindingSource, Health, MachineFinding, Remedy
from everstep.model.incident import Anomaly, Symptom
from everstep.model.pool import OperatorMove

WAIT_S = 1.0
"""A rank that the same fault ends does so within this time, and its incident reports both."""
GATHER_S = 10.0
"""Faults of the same reason on several machines are gathered for this long, and reported together."""
LATELY_S = 60.0
"""Faults that arrive within this time after a fault of the same reason was reported are also grouped."""
FINDINGS_LISTED = 64
"""The number of findings of one anomaly that are listed; further findings are counted."""
EVIDENCE_OF_OTHERS = 1
"""The number of lines of evidence of each finding after the first, if there are several."""


def due(facts: JobFacts) -> list[FindingSeen]:
    """Return the faults to be reported now, all of one reason code; empty: none."""
    if not facts.newest or facts.exits or facts.lost:
        return []
    groups: dict[str, list[FindingSeen]] = defaultdict(list)
    for seen in facts.findings:
        if seen.finding.verdict is Health.FAULTY and facts.now_ns - seen.heard_ns >= WAIT_S * 1e9:
            groups[seen.finding.reason].append(seen)
    for reason, group in groups.items():
        told_ns = facts.faults_accepted.get(reason)
        lately = told_ns is not None and facts.now_ns - told_ns < LATELY_S * 1e9
        gathers = lately or len({seen.machine for seen in group}) > 1
        if not gathers or facts.now_ns - group[0].heard_ns >= GATHER_S * 1e9:
            return group
    return []


def find_machine_fault(facts: JobFacts) -> Anomaly | None:
    """The fault that was received first and is not reported yet, with those of the same reason."""
    group = sorted(due(facts), key=lambda seen: (seen.machine, seen.finding.key))
    if not group:
        return None
    found = [MachineFinding(machine=seen.machine, finding=seen.finding) for seen in group]
    machines = sorted({seen.machine for seen in group})
    listed = [found[0], *(_shortened(one) for one in found[1:FINDINGS_LISTED])]
    return Anomaly(
        id=_id(group),
        generation=facts.generation,
        symptom=Symptom.MACHINE_FAULT,
        headline=_headline(found[0], len(found), len(machines)),
        machines=machines,
        seen_ns=min(seen.finding.since_ns for seen in group),
        findings=listed,
        more_findings=len(found) - len(listed),
    )


def without(anomaly: Anomaly, known: Collection[str]) -> Anomaly | None:
    """Return the part of an anomaly that is not known yet; None: all of it is known.

    Args:
        anomaly: The anomaly of faulty machines.
        known: The subjects of faults that were reported already (``MachineFinding.about``).
    """
    new = [found for found in anomaly.findings if found.about not in known]
    if len(new) == len(anomaly.findings):
        return anomaly
    if not new:
        return None
    gone = {found.machine for found in anomaly.findings} - {found.machine for found in new}
    machines = [machine for machine in anomaly.machines if machine not in gone]
    headline = _headline(new[0], len(new) + anomaly.more_findings, len(machines))
    return anomaly.model_copy(update={"findings": new, "machines": machines, "headline": headline})


def _id(group: Sequence[FindingSeen]) -> str:
    """The id is equal for watchers that gathered the same findings, and only for them: the job accepts each id once."""
    if len(group) == 1:
        return group[0].id
    digest = hashlib.sha256(" ".join(seen.id for seen in group).encode()).hexdigest()[:12]
    return f"{group[0].id}-and-{len(group) - 1}-more-{digest}"


def _headline(first: MachineFinding, findings: int, machines: int) -> str:
    if findings == 1:
        return first.headline
    more = f"{findings - 1} more such {'fault' if findings == 2 else 'faults'}"
    return f"{first.headline}, and {more}" + (f", on {machines} machines together" if machines > 1 else "")


def _shortened(found: MachineFinding) -> MachineFinding:
    short = found.finding.model_copy(update={"evidence": found.finding.evidence[:EVIDENCE_OF_OTHERS]})
    return found.model_copy(update={"finding": short})


def operator_anomaly(move: OperatorMove, generation: int, now_ns: int) -> Anomaly:
    """An operator wants a machine out of its job: an anomaly like that of a fault."""
    finding = Finding(
        inspection=FindingSource.OPERATOR,
        source=FindingSource.OPERATOR,
        reason="operator-evict",
        text=f"{move.operator} takes it out" + (f": {move.reason}" if move.reason else ""),
        remedy=Remedy.NOTHING,
        sure=True,
        since_ns=now_ns,
    )
    found = MachineFinding(machine=move.machine, finding=finding)
    return Anomaly(
        id=f"{finding.reason}-{move.machine}-{now_ns}",
        generation=generation,
        symptom=Symptom.MACHINE_FAULT,
        headline=found.headline,
        machines=[move.machine],
        seen_ns=now_ns,
        findings=[found],
    )


MACHINE_FAULT = Rule(
    name="machine-fault",
    finds="an inspection found a machine faulty, and its ranks continue",
    threshold="1 s after it was found, 10 s where several machines have it; the job continues, an incident reports it",
    source="ByteRobust, section 4.1: inspections",
    find=find_machine_fault,
)
