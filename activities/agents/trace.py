"""The activity that looks at ranks before they are stopped.

What is seen is kept in the ledger, in full; only the verdict crosses Temporal.
"""

from __future__ import annotations

from temporalio import activity

from activities import messages
from activities.agents.kept_looks import KeptLooks
from activities.agents.looks import hang_found, trace
from activities.heartbeat import heartbeating
from activities.ledger import Ledger
from activities.messages import TraceInput
from agent.client import AgentClients
from everstep.model.hang import HangFound


class TraceActivities:
    """The activity that looks at ranks before they are stopped."""

    def __init__(self, agents: AgentClients, ledger: Ledger) -> None:
        self._agents = agents
        self._kept = KeptLooks(ledger)

    @activity.defn(name=messages.TRACE)
    async def trace(self, given: TraceInput) -> HangFound:
        """Look at all ranks of a job that does not step; returns on which machine it hangs, as far as that shows."""
        spec, machines = given.spec, given.machines
        async with heartbeating() as say:
            looks, judged = await trace(
                self._agents,
                spec,
                machines,
                apart_s=given.apart_s,
                generation=given.generation,
                is_hung=True,
                limit_s=given.look_s,
                say=say,
            )
            found = hang_found(looks, judged, spec, machines)
            left_out = await self._kept.keep(given.incident, looks)
        activity.logger.info(
            "ranks were looked at",
            extra={"incident": given.incident, "conclusion": found.conclusion, "machines": found.machines},
        )
        return found.model_copy(update={"left_out": left_out})
