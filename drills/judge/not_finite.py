"""Whether a NaN was told as what it is, and gone back from as far as it takes and no further. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from drills.judge.facts import DrillFacts
from drills.spec.request import DrillRequest
from everstep.model.incident import IncidentReport, Symptom
from everstep.model.job import JobSpec

DISK_STEPS = 2
"""The checkpoint that was under way as the fault struck, and the one before it (ours)."""


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
    if request.base != "nan":
        return []
    found = []
    for report in reports:
        cause = report.failures[0].symptom if report.failures else None
        if cause is not Symptom.NOT_FINITE or f"since step {request.at_step}" not in report.headline:
            found.append(f"it was told as something else: {report.headline}")
        every = spec.checkpoint.disk_every_steps
        oldest = request.at_step - DISK_STEPS * every if every else 0
        if report.recovered and not oldest <= report.resume_step <= request.at_step:
            found.append(f"it went on from step {report.resume_step}, not from one of {oldest} to {request.at_step}")
    return found
