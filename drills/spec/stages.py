"""The stages of a recovery in which a fault of the control plane can strike."""

from __future__ import annotations

from activities.agents.align_ranks import AlignRanks
from activities.agents.check_version import CheckVersion
from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.diagnose_machines import DiagnoseMachines
from activities.agents.launch_ranks import LaunchRanks
from activities.agents.prepare_machines import PrepareMachines
from activities.agents.replay_on_group import ReplayOnGroup
from activities.agents.restore_checkpoints import RestoreCheckpoints
from activities.agents.stop_ranks import StopRanks
from activities.agents.trace_ranks import TraceRanks
from activities.agents.vote_round import VoteRound
from activities.make_version import MakeVersion
from activities.pool.requests import AwaitStandbys, ReplaceMachines
from activities.write_to_ledger import WriteConclusion

BEFORE_AN_UPDATE = {"make": MakeVersion.name, "try": CheckVersion.name}
"""Name of a stage → its activity. In these stages the job prepares an update, before an incident applies it."""
STAGES = {
    **BEFORE_AN_UPDATE,
    "align": AlignRanks.name,
    "vote": VoteRound.name,
    "trace": TraceRanks.name,
    "stop": StopRanks.name,
    "evict": ReplaceMachines.name,
    "prepare": PrepareMachines.name,
    "await": AwaitStandbys.name,
    "decide": WriteConclusion.name,
    "diagnose": DiagnoseMachines.name,
    "replay": ReplayOnGroup.name,
    "restore": RestoreCheckpoints.name,
    "reattempt": LaunchRanks.name,
    "rollback": LaunchRanks.name,
    "launch": LaunchRanks.name,
    "confirm": ConfirmSteps.name,
}
"""Name of a stage → its activity. For ``decide`` it is the activity that records the decision, and for ``rollback`` the
launch of the earlier code."""
REPORT = "report"
"""The stage in which a watcher reports a fault to the job; the job workflow's update has the same name."""
MOMENTS = ("begin", "middle", "end")
"""The moments of an activity at which a fault can strike."""
