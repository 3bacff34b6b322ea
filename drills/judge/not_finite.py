"""Whether a NaN was told as what it is, and gone back from as far as it takes and no further. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from drills.judge.facts import DrillFacts
from drills.spec.request import DrillRequest
from drills.spec.settings import machine_names
from everstep.model.incident import IncidentReport, Symptom
from everstep.model.job import JobSpec

DISK_STEPS = 2
"""The checkpoint that was under way as the fault struck, and the one before it."""


def not_finite_told(
    request: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
) -> list[str]:
    """What is wrong with the incidents of a NaN; nothing for other faults.

    Args:
        request: The drill.
        spec: The job.
        facts: What is known of it.
        reports: Of its incidents.
    """
    if not request.shows_not_finite:
        return []
    found = []
    for report in reports:
        cause = report.failures[0].symptom if report.failures else None
        if cause is not Symptom.NOT_FINITE or f"since step {request.at_step}" not in report.headline:
            found.append(f"it was told as something else: {report.headline}")
        elif lacking := [name for name in first_bad(facts, spec) if name not in report.headline]:
            found.append(f"{lacking[0]} reported it first, and is not named: {report.headline}")
        every = spec.checkpoint.disk_every_steps
        oldest = request.at_step - DISK_STEPS * every if every else 0
        if report.recovered and not oldest <= report.resume_step <= request.at_step:
            found.append(f"it went on from step {report.resume_step}, not from one of {oldest} to {request.at_step}")
    return found


def first_bad(facts: DrillFacts, spec: JobSpec) -> list[str]:
    """Who reported a NaN in an earlier step than others, with their machines; nobody where all did so at once."""
    steps: dict[int, int] = {}
    with_loss = 0
    for rank, records in facts.records.of.items():
        bad = [record.step for record in records if not math.isfinite(struct.unpack("<d", record.bits)[0])]
        with_loss += len(bad) < len(records)
        if bad:
            steps[rank] = min(bad)
    first = [rank for rank, step in steps.items() if step == min(steps.values())]
    names = machine_names(spec.machines)
    return [f"rank {rank} on {names[spec.topology().machine(rank)]}" for rank in first if len(first) < with_loss]
