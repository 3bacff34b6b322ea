"""A rank is killed in the middle of a checkpoint write."""

from __future__ import annotations

from drills.faults.fault import RankFault
from drills.spec.fault import OnRanks, ranks_in_words
from everstep.model.job import JobSpec


class KillDuringSave(OnRanks, RankFault):
    """A slot is half written when its rank dies."""

    name = "kill-during-save"
    summary = "SIGKILL in the middle of a checkpoint write"
    action = "kill-during-save"
    point = "save"
    meets = "opening"

    def describe(self, spec: JobSpec) -> str:
        """The ranks."""
        return f"SIGKILL to {ranks_in_words(self.struck_ranks(spec))} in the middle of a save"
