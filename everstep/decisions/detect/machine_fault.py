"""A machine that an inspection found faulty while its ranks go on.

What is done about it is not decided here: the job goes on, and an incident tells it. Where ranks end meanwhile, the
incident of their end has the finding among its evidence.
"""

from __future__ import annotations

from everstep.decisions.detect.facts import JobFacts
from everstep.decisions.detect.rule import Rule
from everstep.model.health import Health, MachineFinding
from everstep.model.incident import Anomaly, Symptom

WAIT_S = 1.0
"""A rank that the same fault ends does so within this time, and its incident tells of both (ours)."""


def judge(facts: JobFacts) -> Anomaly | None:
    """The fault that was heard of first and is not told yet."""
    if not facts.newest or facts.exits or facts.lost:
        return None
    due_ns = facts.now_ns - round(WAIT_S * 1e9)
    for seen in facts.findings:
        if seen.finding.verdict is Health.FAULTY and seen.heard_ns <= due_ns:
            found = MachineFinding(machine=seen.machine, finding=seen.finding)
            return Anomaly(
                id=seen.id,
                generation=facts.generation,
                symptom=Symptom.MACHINE_FAULT,
                headline=found.headline,
                machines=[seen.machine],
                seen_ns=seen.finding.since_ns,
                findings=[found],
            )
    return None


MACHINE_FAULT = Rule(
    name="machine-fault",
    finds="an inspection found a machine faulty, and its ranks go on",
    threshold="1 s after it was found; the job goes on, and an incident tells it",
    source="ByteRobust, section 4.1: inspections; what follows from them is not built yet",
    judge=judge,
)
