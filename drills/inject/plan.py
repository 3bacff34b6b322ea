"""The plan of a drill: the entries for ranks, for workers and for the injector itself."""

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
    """The entries of one drill's plan, and the files in which ranks and workers read them."""

    plan: Path
    """File of the ranks' plan; the marks of the injector's own actions lie beside it."""
    ranks: list[Entry]
    outside: list[Entry]
    """Entries for the injector itself."""
    worker_plan: Path
    """File of the workers' plan."""
    workers: list[Entry]
    holds: list[Entry] = field(default_factory=list)
    """Entries for ranks that wait at a step for the injector."""

    def write(self) -> None:
        """Write both files atomically, since ranks and workers may read them at any time."""
        for path, content in ((self.plan, [*self.ranks, *self.holds]), (self.worker_plan, self.workers)):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(content))
            temporary.rename(path)

    def let_go(self) -> None:
        """Let the ranks that wait for the injector continue."""
        for hold in self.holds:
            Path(hold["until"]).touch()

    def fired(self) -> dict[str, dict[str, Any] | None]:
        """Return the id of each entry → the mark that it fired, or None."""
        marks = {fault["id"]: faults.fired(self.plan, fault) for fault in (*self.ranks, *self.outside)}
        return marks | {fault["id"]: faults.fired(self.worker_plan, fault) for fault in self.workers}


def planned(request: DrillRequest, spec: JobSpec, plan: Path, cluster: DrillCluster) -> Planned:
    """Make the plan of a drill, with its ranks' plan in the file ``plan``.

    Raises:
        CannotInject: the process to be killed does not belong to the cluster.
    """
    ranks = request.opening.rank_entries(request.at_step, spec, plan)
    workers = request.fault.worker_entries(spec, plan, cluster.processes)
    outside: list[Entry] = [{"id": name} for name in request.fault.marks]
    holds: list[Entry] = []
    if request.waits_at_hold:
        holds = [_hold(plan, 0, request.hold_step, "step")]
    elif (at_step := request.strike_hold) is not None:
        # All ranks wait at the begin of the step: if some waited after a collective, others could complete the step.
        holds = [_hold(plan, rank, at_step, "begin") for rank in range(spec.topology().world_size)]
    return Planned(plan, ranks, outside, cluster.worker_plan, workers, holds)


def _hold(plan: Path, rank: int, step: int, point: str) -> Entry:
    until = f"{plan}.go"
    return {"id": f"hold-{rank}", "fault": "hold", "rank": rank, "at_step": step, "point": point, "until": until}
