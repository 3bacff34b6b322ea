"""Whether the right machines left the job: those at fault or gone, and never a healthy one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from drills.spec.catalogue import HANGS
from drills.spec.loss import loss_of
from drills.spec.request import DrillRequest
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec

NEAR_S = 10.0
"""A machine that is away for about as long as it may be silent may leave, or stay."""


def due(request: DrillRequest, spec: JobSpec) -> list[str]:
    """Machines that have to leave the job: all of them, or, where there are not enough others, none."""
    names = []
    away = request.base == "link-down" and request.seconds > spec.policy.silence.evict_s + NEAR_S
    if request.parks:
        return []
    if request.replaces or request.base == "bitflip" or away:
        names = [request.struck_machine(spec)]
    elif request.base == "cut-link":
        names = [request.ends(spec)[1]]
    elif request.base in HANGS:
        names = sorted({f"m{spec.topology().machine(rank)}" for rank in request.struck_ranks(spec)})
    elif request.gone:
        names = [f"m{index}" for index in loss_of(request, spec).machines]
    return sorted(names) if len(names) <= request.spare else []


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
    texts: Sequence[str] = (),
) -> list[str]:
    """What is wrong with who left the job.

    Args:
        request: Of the drill.
        spec: Of its job.
        evicted: Machines that left.
        standby: That was to take a place, and could not: it leaves too, unless the pool knew it before.
        beside: That left on purpose with those at fault.
        texts: What the incidents said.
    """
    wanted, may = due(request, spec), {standby, *beside}
    if request.base == "link-down" and request.seconds > spec.policy.silence.evict_s - NEAR_S:
        may.add(request.struck_machine(spec))
    if standby and request.standby == "dies":
        wanted = [*wanted, standby]
    found = [f"{name} is at fault, and did not leave the job" for name in wanted if name not in evicted]
    found += [f"{name} left the job, and nothing is wrong with it" for name in evicted if name not in {*wanted, *may}]
    if request.base == "hang-agents" and not any("would be evicted" in text for text in texts):
        found.append("nobody was told that the breaker tripped")
    return found
