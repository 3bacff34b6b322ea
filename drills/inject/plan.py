"""The plan of a drill: faults that ranks and workers act out, and what is done to them from outside."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drills.clusters.local import DrillCluster
from drills.inject.memory_group import folder_of_group
from drills.spec.catalogue import CONTROL_FAULTS, DEVICES, LOSSES, MACHINE_FAULTS, UPDATES
from drills.spec.request import DrillRequest
from drills.spec.updates import AGAIN, PARKED
from everstep.errors import CannotInject
from everstep.model.job import JobSpec
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.rank import drill_faults as faults

Fault = dict[str, Any]

STANDBY_HOLD = "standby"
"""Id of the hold in which the machine is lost that is to take the place of another one."""
FIRST = 1
"""Number of a job's first version, which a rollback goes back to here."""
STRIKE = "strike"
"""Id of the second fault, which makes copies needed."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The faults of one drill and the files that say so."""

    plan: Path
    """For ranks; the injector's own marks lie beside it."""
    ranks: list[Fault]
    outside: list[Fault]
    """Done by the injector itself."""
    worker_plan: Path
    workers: list[Fault]
    holds: list[Fault] = field(default_factory=list)
    """Where the job waits for the injector."""

    def write(self) -> None:
        """Write the plans, whole or not at all: ranks and workers read them at any time."""
        for path, content in ((self.plan, [*self.ranks, *self.holds]), (self.worker_plan, self.workers)):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(content))
            temporary.rename(path)

    def let_go(self) -> None:
        """Let the job go on."""
        for hold in self.holds:
            Path(hold["until"]).touch()

    def fired(self) -> dict[str, dict[str, Any] | None]:
        """Fault id → when and where it fired, or None."""
        marks = {fault["id"]: faults.fired(self.plan, fault) for fault in (*self.ranks, *self.outside)}
        return marks | {fault["id"]: faults.fired(self.worker_plan, fault) for fault in self.workers}


def planned(request: DrillRequest, spec: JobSpec, plan: Path, cluster: DrillCluster) -> Planned:
    """The plan of a drill.

    Raises:
        CannotInject: the part to be killed is not ours.
    """
    struck = request.struck_machine(spec)
    ranks = [] if request.outside else rank_faults(request, request.struck_ranks(spec), struck)
    workers: list[Fault] = []
    # Tests have the plan of the agents, which is that of the workers.
    if request.base == "bitflip" and not request.only_in_job:
        of_tests = {"id": f"bitflip-{spec.name}", "fault": "bitflip", "machine": struck, "of_tests": True}
        workers.append(of_tests)
    if request.base == "bitflip" and request.finite:
        ranks.append(_check_of(ranks[0], request, spec))
    if request.base in UPDATES:
        ranks, workers = _around_an_update(request, spec, plan)
    if request.fault in CONTROL_FAULTS:
        fault: Fault = {"id": f"{request.fault}-{spec.name}", "fault": request.fault, "job": spec.name}
        if request.at_event is not None:
            fault |= {"at_event": request.at_event, "workflow_id": request.swept(spec.name)}
        else:
            fault |= {"in_stage": request.in_stage, "moment": request.moment}
            fault |= {"version": FIRST} if request.in_stage == "rollback" else {}
        if request.fault == "kill-temporal":
            if "temporal" not in cluster.processes():
                raise CannotInject(f"kill-temporal: the server at {cluster.file.temporal_address} is not ours to kill")
            fault["pid"] = cluster.processes()["temporal"]
        workers.append(fault)
    if request.standby == "dies":
        until = {"until": f"{plan}.standby"}
        hold: Fault = {"id": STANDBY_HOLD, "fault": "hold", "job": spec.name, "in_stage": "prepare", "moment": "begin"}
        workers.append(hold | until)
    holds: list[Fault] = []
    if request.waits_at_hold:
        holds = [_hold(plan, 0, request.hold_step, "step")]
    elif (at_step := request.strike_hold) is not None:
        # All of them at once, and before they do anything together that would let others complete the step.
        holds = [_hold(plan, rank, at_step, "begin") for rank in range(spec.topology().world_size)]
    return Planned(plan, ranks, outside_faults(request), cluster.worker_plan, workers, holds)


def _around_an_update(request: DrillRequest, spec: JobSpec, plan: Path) -> tuple[list[Fault], list[Fault]]:
    """What ranks and workers meet before an update is asked for, or while it is tried."""
    if request.asked_during == PARKED:
        times = RecoveryPolicy().retry.max_failures_at_step
        kills = request.model_copy(update={"fault": "kill-rank", "during": "", "times": times})
        return rank_faults(kills, request.struck_ranks(spec)), []
    if request.asked_during in ("kill-rank", AGAIN):
        hold = {"id": f"stop-{spec.name}", "fault": "hold", "job": spec.name, "in_stage": "stop", "moment": "middle"}
        return [], [{**hold, "until": f"{plan}.tried"}]
    return [], []


def _check_of(flips: Fault, request: DrillRequest, spec: JobSpec) -> Fault:
    """What aborts a job whose gradients have wrong bits; not on the machine that has them."""
    elsewhere = spec.topology().ranks((request.target_machine_index(spec) + 1) % spec.machines)[0]
    at = {"rank": elsewhere, "at_step": request.at_step, "point": "step"}
    return {"id": "check", "fault": "check", "of": flips["id"], **at}


def _hold(plan: Path, rank: int, step: int, point: str) -> Fault:
    until = f"{plan}.go"
    return {"id": f"hold-{rank}", "fault": "hold", "rank": rank, "at_step": step, "point": point, "until": until}


def outside_faults(request: DrillRequest) -> list[Fault]:
    """What the injector itself does, in the order in which it comes."""
    names: list[str] = []
    if request.is_slowed:
        names = [request.base]
    elif request.fault in (*MACHINE_FAULTS, *DEVICES):
        names = [request.fault, *([STRIKE] if request.then else [])]
    elif request.base in DEVICES:
        names = [request.base]
    elif request.base in UPDATES:
        strikes = request.then or request.asked_during == "kill-rank"
        names = [request.base, *([STRIKE] if strikes else [])]
    elif request.outside:
        names = [] if request.base in LOSSES else [request.base]
        names += [] if request.absorbed or request.parks or request.base in ("link-down", "cut-link") else [STRIKE]
    return [{"id": name} for name in names]


def rank_faults(request: DrillRequest, ranks: list[int], struck: str = "") -> list[Fault]:
    """The faults that ranks act out, in the order in which they come; ``struck``: the machine that is broken."""
    found: list[Fault] = []
    for again in range(request.times):
        together = [f"f{again}-{rank}" for rank in ranks]
        for rank, name in zip(ranks, together, strict=True):
            fault: Fault = {"id": name, "fault": request.base, "rank": rank, "at_step": request.at_step}
            fault["point"] = {"kill-during-save": "save", "nan": "begin", "bitflip": "begin"}.get(request.base, "step")
            if request.bound:
                fault["machine"] = request.machine
            if request.base == "bitflip":
                fault |= {"machine": struck, "only_in_job": request.only_in_job}
                fault |= {"shows_every": request.shows_every, "finite": request.finite}
            if len(ranks) > 1:
                fault["together"] = together
            match request.base:
                case "kill-rank":
                    fault["signal"] = request.signal
                case "oom":
                    fault["group"] = str(folder_of_group())
                case "exit-rank":
                    fault["code"] = request.exit_code
                case "raise":
                    fault["exception"] = request.exception
            found.append(fault)
    return found
