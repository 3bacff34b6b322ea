"""Whether the right machines left the job: those at fault or gone, and never a healthy one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from drills.spec.request import DrillRequest
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec


def over_evicted(reports: Iterable[IncidentReport], guilty: Collection[str]) -> list[str]:
    """Machines that left on purpose beside one that is at fault, as their incident says: over-eviction.

    Args:
        reports: Of the job's incidents.
        guilty: Machines at fault.
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
    """What is wrong with who left the job.

    Args:
        request: Of the drill.
        spec: Of its job.
        evicted: Machines that left.
        standby: That was to take a place, and could not: it leaves too, unless the pool knew it before.
        beside: That left on purpose with those at fault.
    """
    wanted, may = request.leaving(spec), {standby, *beside} | request.opening.may_leave(spec)
    if standby and request.opening.standby_is_lost:
        wanted = [*wanted, standby]
    found = [f"{name} is at fault, and did not leave the job" for name in wanted if name not in evicted]
    found += [f"{name} left the job, and nothing is wrong with it" for name in evicted if name not in {*wanted, *may}]
    return found
