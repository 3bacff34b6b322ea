"""Checks that the right machines left the job: those at fault or gone, never a healthy one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from drills.spec.request import DrillRequest
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec


def over_evicted(reports: Iterable[IncidentReport], guilty: Collection[str]) -> list[str]:
    """Over-eviction: healthy machines that an incident evicted together with a machine at fault, on purpose.

    Args:
        reports: Reports of the job's incidents.
        guilty: The machines at fault.
    """
    beside: set[str] = set()
    for report in reports:
        if report.hang and report.hang.over_evicts and not set(guilty).isdisjoint(report.hang.machines):
            beside |= set(report.evicted) & set(report.hang.machines) - set(guilty)
    return sorted(beside)


def evictions_right(
    request: DrillRequest,
    spec: JobSpec,
    evicted: Sequence[str],
    *,
    standby: str = "",
    beside: Sequence[str] = (),
) -> list[str]:
    """Problems with the set of machines that left the job.

    Args:
        request: Request of the drill.
        spec: Spec of its job.
        evicted: The machines that left.
        standby: A standby that was chosen and failed: it leaves too, unless the pool knew its fault before.
        beside: Machines that left by over-eviction.
    """
    wanted, may = request.leaving(spec), {standby, *beside} | request.opening.may_leave(spec)
    if standby and request.opening.standby_is_lost:
        wanted = [*wanted, standby]
    found = [f"{name} is at fault, and did not leave the job" for name in wanted if name not in evicted]
    found += [f"{name} left the job, and nothing is wrong with it" for name in evicted if name not in {*wanted, *may}]
    return found
