"""The plan of a drill: faults for ranks and workers, and the injector's faults from outside."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drills.clusters.local import DrillCluster
from drills.spec.fault import Entry
from drills.spec.request import DrillRequest
from everstep.model.job import JobSpec
from everstep.rank import drill_faults as faults


@dataclass(frozen=True, slots=True)
class Planned:
    """The faults of one drill, and the files of its plan."""

    plan: Path
    """The plan for ranks; the injector's own marks lie beside it."""
    ranks: list[Entry]
    outside: list[Entry]
    """Entries for the injector itself."""
    worker_plan: Path
    workers: list[Entry]
    holds: list[Entry] = field(default_factory=list)
    """Entries at which the job waits for the injector."""

    def write(self) -> None:
        """Write each plan atomically, since ranks and workers read them at any time."""
        for path, content in ((self.plan, [*self.ranks, *self.holds]), (self.worker_plan, self.workers)):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(content))
            temporary.rename(path)

    def let_go(self) -> None:
        """Let the job step again."""
        for hold in self.holds:
            Path(hold["until"]).touch()

    def fired(self) -> dict[str, dict[str, Any] | None]:
        """Fault id → when and where it fired, or None."""
        marks = {fault["id"]: faults.fired(self.plan, fault) for fault in (*self.ranks, *self.outside)}
        return marks | {fault["id"]: faults.fired(self.worker_plan, fault) for fault in self.workers}


def planned(request: DrillRequest, spec: JobSpec, plan: Path, cluster: DrillCluster) -> Planned:
    """The plan of a drill.

    Raises:
        CannotInject: the part to be killed is not of this cluster.
    """
    ranks = request.opening.rank_entries(request.at_step, spec, plan)
    workers = request.fault.worker_entries(spec, plan, cluster.processes)
    outside: list[Entry] = [{"id": name} for name in request.fault.marks]
    holds: list[Entry] = []
    if request.waits_at_hold:
        holds = [_hold(plan, 0, request.hold_step, "step")]
    elif (at_step := request.strike_hold) is not None:
        # All at once, and before a collective that would let other ranks complete the step.
        holds = [_hold(plan, rank, at_step, "begin") for rank in range(spec.topology().world_size)]
    return Planned(plan, ranks, outside, cluster.worker_plan, workers, holds)


def _hold(plan: Path, rank: int, step: int, point: str) -> Entry:
    until = f"{plan}.go"
    return {"id": f"hold-{rank}", "fault": "hold", "rank": rank, "at_step": step, "point": point, "until": until}
