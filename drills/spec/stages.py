"""Where in a recovery a fault of the control plane strikes."""

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
from activities.ledger.write_conclusion import WriteConclusion
from activities.pool.await_standbys import AwaitStandbys
from activities.pool.replace_machines import ReplaceMachines
from activities.versions.make_version import MakeVersion

BEFORE_AN_UPDATE = {"make": MakeVersion.name, "try": CheckVersion.name}
"""What the job's workflow does with a version before an incident applies it → the activity that it consists of."""
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
"""Stage of an incident → the activity that it consists of; of the decision, the one that writes it down, and of a
rollback the launch of the code that it goes back to."""
REPORT = "report"
"""The stage before an incident; the update of the job's workflow has that name."""
MOMENTS = ("begin", "middle", "end")
"""Of a stage's activity."""
