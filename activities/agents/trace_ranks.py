"""Trace ranks: sample the ranks of a hung job before they are stopped.

The ledger keeps whole stacks and records of the ranks that matter; only the result passes through Temporal.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import Activity, Bounds, within
from activities.heartbeat import Say
from everstep.model.hang import HangResult
from everstep.model.job import PlacedJob

if TYPE_CHECKING:
    from activities.tools import Tools

APART_S = 0.3
"""The time between two samples, seconds."""
LONGEST_SAMPLE_S = 5.0
"""The longest time limit of one sample, seconds."""
ROOM_S = 4.0
"""The part of a trace's time that is not for its two samples, seconds."""


class TraceRanks(Activity[HangResult]):
    """Sample all ranks of a hung job; the result says on which machine it hangs, if the samples show that.

    The ranks continue. All attempts of the activity together have the time limit of the policy.
    """

    name = "Trace ranks"

    job: PlacedJob
    generation: int
    incident: str
    """The id of the incident's workflow: the stacks are kept under it."""

    @property
    def sample_s(self) -> float:
        """The time limit of one sample, seconds."""
        return min(LONGEST_SAMPLE_S, max((self.job.spec.policy.hang.trace_s - ROOM_S) / 2, 0.5))

    def line(self) -> str:
        return f"ranks of generation {self.generation} on {len(self.job.machines)} machines"

    def bounds(self) -> Bounds:
        return within(timedelta(seconds=self.job.spec.policy.hang.trace_s))

    async def perform(self, tools: Tools, say: Say) -> HangResult:
        from activities.agents.looks import hang_found, keep_looks, trace

        spec, machines = self.job.spec, self.job.machines
        looks, judged = await trace(
            tools.agents,
            spec,
            machines,
            apart_s=APART_S,
            generation=self.generation,
            is_hung=True,
            limit_s=self.sample_s,
            say=say,
        )
        found = hang_found(looks, judged, spec, machines)
        ranks = judged.check.verdict.ranks
        left_out = await keep_looks(tools, self.incident, self.job, looks, named=ranks)
        activity.logger.info(
            "ranks of a hung job were sampled",
            extra={"incident": self.incident, "conclusion": found.conclusion, "machines": found.machines},
        )
        return found.model_copy(update={"left_out": left_out})
