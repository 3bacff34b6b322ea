"""Prepare machines: start the job's fork servers, and bring the job's code to the machines at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field
from temporalio.exceptions import ApplicationError

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say
from everstep.decisions.pool.ready import differing
from everstep.errors import EverstepError
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient, AgentClients
    from agent.v1 import agent_pb2 as pb

OTHER_LIBRARIES = "OtherLibraries"
"""The error type for a machine whose libraries differ from those of the job's other machines."""
ANSWER_S = 1.0
"""The longest wait for a machine's list of libraries, seconds."""


class PrepareMachines(Activity[float]):
    """Start the job's fork server on every machine, and bring the job's code there; the result is the time of the
    slowest start, seconds."""

    name = "Prepare machines"

    job: PlacedJob
    patience_s: float = 60.0
    """Silent agents are asked again for this long, seconds."""
    probed: bool = False
    """Slow agents are probed, see :class:`~activities.agents.stop_ranks.StopRanks`. The activity then fails for a
    silent machine, and is not retried."""
    like: list[Machine] = Field(default_factory=list)
    """Prepared machines of the job: a machine whose libraries differ from theirs is refused. Empty: all libraries are
    accepted."""

    def line(self) -> str:
        return f"fork servers on {len(self.job.machines)} machines"

    def bounds(self) -> Bounds:
        return twice(timedelta(minutes=5))

    async def perform(self, tools: Tools, say: Say) -> float:
        from activities.agents.call_all import call_agent, on_all, prepare, refuse_silent
        from activities.agents.ship import Shipment

        spec, machines = self.job.spec, self.job.machines
        async with Shipment(tools.versions, spec.code, say) as code:

            async def ready(client: AgentClient) -> pb.PrepareReply:
                reply, _ = await asyncio.gather(prepare(client, spec, self.job.run), code.supply(client))
                return reply

            async def prepare_machine(machine: Machine, client: AgentClient) -> pb.PrepareReply:
                return await call_agent(client, partial(ready, client), probed=self.probed, patience_s=self.patience_s)

            (done, silent), elsewhere = await asyncio.gather(
                on_all(tools.agents, machines, prepare_machine, say=say, patience_s=self.patience_s),
                _libraries_of(tools.agents, spec.name, self.like),
            )
        refuse_silent(silent, machines, for_good=self.probed)
        for machine, reply in done.items():
            if difference := differing(reply.libraries, [elsewhere]):
                raise ApplicationError(f"{machine} has {difference}", type=OTHER_LIBRARIES, non_retryable=True)
        return max((reply.seconds for reply in done.values()), default=0.0)


async def _libraries_of(agents: AgentClients, job: str, machines: Sequence[Machine]) -> dict[str, str]:
    """Return the libraries that a job's fork servers have imported, with versions, as one of the machines reports them.

    Args:
        agents: Clients by address.
        job: The name of the job.
        machines: The machines that were prepared; the first answer counts.

    Returns:
        Library → version; empty if no machine reports its libraries.
    """

    async def ask(machine: Machine) -> dict[str, str]:
        with contextlib.suppress(EverstepError):
            described = await agents.get(machine.address).describe(timeout_s=ANSWER_S)
            return next((dict(here.libraries) for here in described.jobs if here.job == job), {})
        return {}

    asked = [asyncio.create_task(ask(machine)) for machine in machines]
    try:
        for answer in asyncio.as_completed(asked):
            if found := await answer:
                return found
        return {}
    finally:
        for task in asked:
            task.cancel()
