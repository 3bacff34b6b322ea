"""The default answers of a scripted cluster."""

from __future__ import annotations

import time

from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.diagnose_machines import DiagnoseMachines
from activities.agents.replay_on_group import ReplayOnGroup
from activities.agents.trace_ranks import TraceRanks
from activities.agents.vote_round import VoteRound
from activities.make_version import MakeVersion, VersionMade
from everstep.model.diagnosis import Diagnosis, MachineDiagnosis
from everstep.model.finding import Health
from everstep.model.hang import HangResult
from everstep.model.launch import Confirmation
from everstep.model.replay import GroupRun, RunEnd
from everstep.model.slow import SlowRound


def all_stepped(given: ConfirmSteps) -> Confirmation:
    """Answer that all ranks stepped."""
    now_ns, generation = time.time_ns(), given.launched.generation
    return Confirmation(generation=generation, ok=True, reason="all stepped", stepped_ns=now_ns, completed_steps=21)


def made(given: MakeVersion) -> VersionMade:
    """Answer with the requested version."""
    runs = given.request.made or given.running.model_copy(
        update={"code": given.request.code, "args": given.request.args or []}
    )
    return VersionMade(runs=runs, changed="1 file changed")


def all_healthy(given: DiagnoseMachines) -> Diagnosis:
    """Answer that no machine is at fault."""
    return Diagnosis(machines=[MachineDiagnosis(machine=one.name, verdict=Health.HEALTHY) for one in given.machines])


def nothing_seen(given: TraceRanks) -> HangResult:
    """Answer that no samples could be taken."""
    return HangResult(generation=given.generation, conclusion="nothing known", reason="there are no stacks")


def computed_alike(given: ReplayOnGroup) -> GroupRun:
    """Answer with the same results for every group."""
    names = [machine.name for machine in given.job.machines]
    bits = ["a"] * given.steps
    return GroupRun(group=given.group, machines=names, end=RunEnd.RAN, repeat=given.repeat, losses=bits, states=["s"])


def even(given: VoteRound) -> SlowRound:
    """Answer that no rank is slower than others."""
    return SlowRound(number=given.number, looks=10, job="none", job_why="most ranks compute no longer than before")
