"""Whether an incident said of a job that became slow what slows it down. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from drills.spec.request import DrillRequest
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.slow import SlowConclusion


def slow_told(request: DrillRequest, spec: JobSpec, reports: Sequence[IncidentReport]) -> list[str]:
    """What is wrong with what was told; nothing where nothing was slowed down."""
    if not request.is_slowed:
        return []
    found = next((report.slow for report in reports if report.slow), None)
    if found is None:
        return ["no incident looked for a slow machine"]
    said = f"{found.conclusion}: {found.reason}"
    if request.base == "slow-machine":
        right = found.machines == [request.struck_machine(spec)]
        return [] if right else [f"the slow machine was not named: {said}"]
    if found.conclusion == SlowConclusion.MACHINE or found.machines:
        return [f"a machine was named, and none is slow: {said}"]
    return []
