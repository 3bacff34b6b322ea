"""Checks that the right machines left the job: those at fault or gone, and no healthy one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from drills.spec.request import DrillRequest
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec


def over_evicted(reports: Iterable[IncidentReport], guilty: Collection[str]) -> list[str]:
    """Return the healthy machines that an incident evicted on purpose, since a machine of their group is at fault.

    Args:
        reports: Reports of the job's incidents.
        guilty: The machines at fault.
    """
    beside: set[str] = set()
    for report in reports:
        if report.hang and report.hang.over_evicts and not set(guilty).isdisjoint(report.hang.machines):
            beside |= set(report.evicted) & set(report.hang.machines) - set(guilty)
    return sorted(beside)


def eviction_problems(
    request: DrillRequest,
    spec: JobSpec,
    evicted: Sequence[str],
    *,
    standby: str = "",
    beside: Sequence[str] = (),
) -> list[str]:
    """Return problems with the set of machines that left the job.

    Args:
        request: The drill.
        spec: Its job.
        evicted: The machines that left the job.
        standby: A standby that was chosen and failed: it may leave the job too.
        beside: Healthy machines that left by over-eviction.
    """
    must, may = request.leaving(spec), {standby, *beside} | request.opening.may_leave(spec)
    if standby and request.opening.standby_is_lost:
        must = [*must, standby]
    return [
        *(f"{name} is at fault, and did not leave the job" for name in must if name not in evicted),
        *(f"{name} left the job, and nothing is wrong with it" for name in evicted if name not in {*must, *may}),
    ]
