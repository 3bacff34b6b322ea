"""The activity that looks at ranks before they are stopped.

What is seen is kept in the ledger, in full; only the verdict crosses Temporal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from temporalio import activity

from activities import messages
from activities.agents.looks import RankLook, hang_found, trace
from activities.heartbeat import heartbeating
from activities.ledger import Ledger
from activities.messages import TraceInput
from agent.client import AgentPool
from everstep.errors import LedgerError
from everstep.model.hang import HangFound

KEEP_S = 0.2
"""The ledger is waited for so long; it goes on taking what was seen after that (ours)."""


class TraceActivities:
    """The activity that looks at ranks before they are stopped."""

    def __init__(self, agents: AgentPool, ledger: Ledger) -> None:
        self._agents = agents
        self._ledger = ledger
        self._writing: set[asyncio.Future[None]] = set()

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
                stands_still=True,
                limit_s=given.look_s,
                say=say,
            )
            found = hang_found(looks, judged, spec, machines)
            left_out = await self._keep(given.incident, looks)
        activity.logger.info(
            "ranks were looked at",
            extra={"incident": given.incident, "conclusion": found.conclusion, "machines": found.machines},
        )
        return found.model_copy(update={"left_out": left_out})

    async def _keep(self, incident: str, looks: Sequence[RankLook]) -> str:
        """Write what was seen to the ledger; one that is slow goes on by itself. Returns why it is not all there."""
        rows = [
            (number, machine, reply.time_ns, reply.SerializeToString())
            for number, one in enumerate(looks, 1)
            for machine, reply in one.replies.items()
        ]
        writing = asyncio.ensure_future(self._ledger.call(Ledger.looks_taken, incident, rows))
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        await asyncio.wait([writing], timeout=KEEP_S)
        if not writing.done():
            return "the ledger did not take the stacks in time"
        return str(writing.exception() or "")

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled() and isinstance(error := writing.exception(), LedgerError):
            activity.logger.warning("the ledger did not take the stacks", extra={"error": str(error)})
