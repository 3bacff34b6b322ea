"""A rank is killed in the middle of a checkpoint write."""

from __future__ import annotations

from drills.faults.fault import RankFault
from drills.spec.fault import OnRanks


class KillDuringSave(OnRanks, RankFault):
    """A slot is half written when its rank dies."""

    name = "kill-during-save"
    summary = "SIGKILL in the middle of a checkpoint write"
    line = "SIGKILL to {ranks} in the middle of a save"
    action = "kill-during-save"
    point = "save"
    meets = "opening"
