"""All activities, as a worker registers them. A new activity needs a class, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from temporalio import activity

from activities.activity import Activity
from activities.agents.align_ranks import AlignRanks
from activities.agents.await_machines import AwaitMachines
from activities.agents.check_room import CheckRoom
from activities.agents.check_version import CheckVersion
from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.diagnose_machines import DiagnoseMachines
from activities.agents.find_checkpoints import FindCheckpoints
from activities.agents.launch_ranks import LaunchRanks
from activities.agents.prepare_machines import PrepareMachines
from activities.agents.read_folder import ReadFolder
from activities.agents.release_machines import ReleaseMachines
from activities.agents.replay_on_group import ReplayOnGroup
from activities.agents.restore_checkpoints import RestoreCheckpoints
from activities.agents.stop_ranks import StopRanks
from activities.agents.trace_ranks import TraceRanks
from activities.agents.vote_round import VoteRound
from activities.deliver_notice import DeliverNotice
from activities.heartbeat import heartbeating
from activities.make_version import MakeVersion
from activities.pool.look_at_machines import LookAtMachines
from activities.pool.provision_machines import ProvisionMachines
from activities.pool.ready_standbys import ReadyStandbys
from activities.pool.requests import AwaitStandbys, GiveMachinesBack, LeaseMachines, ReplaceMachines
from activities.read_closed_incident import ReadClosedIncident
from activities.write_to_ledger import RecordJob, WriteConclusion

if TYPE_CHECKING:
    from activities.tools import Tools

ACTIVITIES: tuple[type[Activity[Any]], ...] = (
    *(PrepareMachines, StopRanks, LaunchRanks, ConfirmSteps, AlignRanks, AwaitMachines, ReleaseMachines),
    *(FindCheckpoints, ReadFolder, CheckRoom, RestoreCheckpoints),
    *(TraceRanks, VoteRound, DiagnoseMachines, ReplayOnGroup),
    *(MakeVersion, CheckVersion),
    *(LeaseMachines, ReplaceMachines, GiveMachinesBack, AwaitStandbys),
    *(LookAtMachines, ProvisionMachines, ReadyStandbys),
    *(ReadClosedIncident, WriteConclusion, RecordJob, DeliverNotice),
)


def functions(tools: Tools) -> list[Callable[..., Coroutine[Any, Any, Any]]]:
    """Return the functions that a worker registers, with each activity's name."""
    return [function(kind, tools) for kind in ACTIVITIES]


def function(kind: type[Activity[Any]], tools: Tools) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return an activity as a function for Temporal; it sends heartbeats while it runs."""

    async def perform(request: Any) -> Any:
        async with heartbeating() as say:
            return await request.perform(tools, say)

    perform.__annotations__ = {"request": kind, "return": kind.result_type()}
    return activity.defn(name=kind.name)(perform)
