"""Whether the right machines left the job: those at fault or gone, and never a healthy one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from drills.spec.loss import loss_of
from drills.spec.request import DrillRequest
from everstep.model.job import JobSpec


def due(request: DrillRequest, spec: JobSpec) -> list[str]:
    """Machines that have to leave the job: all of them, or, where there are not enough others, none."""
    names = []
    if request.replaces:
        names = [request.struck_machine(spec)]
    elif request.gone:
        names = [f"m{index}" for index in loss_of(request, spec).machines]
    return sorted(names) if len(names) <= request.spare else []


def evictions_right(request: DrillRequest, spec: JobSpec, evicted: Sequence[str]) -> list[str]:
    """What is wrong with who left the job."""
    wanted = due(request, spec)
    found = [f"{name} is at fault, and did not leave the job" for name in wanted if name not in evicted]
    return found + [f"{name} left the job, and nothing is wrong with it" for name in evicted if name not in wanted]
