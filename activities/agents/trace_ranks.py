"""Ranks of a job that hangs are sampled before they are stopped.

What is seen is kept in the ledger, in full; only the verdict crosses Temporal.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import Activity, Bounds, within
from activities.heartbeat import Say
from everstep.model.hang import HangFound
from everstep.model.job import PlacedJob

if TYPE_CHECKING:
    from activities.tools import Tools

APART_S = 0.3
"""Between two samples, seconds."""
LONGEST_SAMPLE_S = 5.0
"""One sample of ranks takes no longer."""
ROOM_S = 4.0
"""Of the time that a trace has, for what comes beside its two samples, seconds."""


class TraceRanks(Activity[HangFound]):
    """Sample all ranks of a job that does not step; the result says on which machine it hangs, as far as that shows.

    The ranks continue. It is tried once or twice, and never for longer than the policy allows.
    """

    name = "Trace ranks"

    job: PlacedJob
    generation: int
    incident: str
    """Id of the incident's workflow: what is seen is kept with it."""

    @property
    def sample_s(self) -> float:
        """The limit of one sample, seconds."""
        return min(LONGEST_SAMPLE_S, max((self.job.spec.policy.hang.trace_s - ROOM_S) / 2, 0.5))

    def line(self) -> str:
        return f"generation {self.generation}: what its ranks do, on {len(self.job.machines)} machines"

    def bounds(self) -> Bounds:
        return within(timedelta(seconds=self.job.spec.policy.hang.trace_s))

    async def perform(self, tools: Tools, say: Say) -> HangFound:
        from activities.agents.kept_looks import keep_looks
        from activities.agents.looks import hang_found, trace

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
        left_out = await keep_looks(tools.ledger, self.incident, looks)
        activity.logger.info(
            "ranks were looked at",
            extra={"incident": self.incident, "conclusion": found.conclusion, "machines": found.machines},
        )
        return found.model_copy(update={"left_out": left_out})
