"""Fork servers of a job are started on its machines, and its code is brought there meanwhile."""

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
"""Type of the error of a machine that has other libraries than the job's other machines."""
ANSWER_S = 1.0
"""Machines that do not say it within this time are not waited for, seconds."""


class PrepareMachines(Activity[float]):
    """Start the job's fork server on every machine; the result is the slowest start, seconds."""

    name = "Prepare machines"

    job: PlacedJob
    patience_s: float = 60.0
    """How long a silent agent is asked again, seconds."""
    probed: bool = False
    """As of :class:`~activities.agents.stop_ranks.StopRanks`; a machine that is silent then is given up."""
    like: list[Machine] = Field(default_factory=list)
    """Machines on which it was prepared before: with other libraries than theirs it is refused. Empty: with any."""

    def line(self) -> str:
        return f"fork servers on {len(self.job.machines)} machines"

    def bounds(self) -> Bounds:
        return twice(timedelta(minutes=5))

    async def perform(self, tools: Tools, say: Say) -> float:
        from activities.agents.call_all import asked_of, on_all, prepare, refuse_silent
        from activities.agents.ship import Shipment

        spec, machines = self.job.spec, self.job.machines
        async with Shipment(tools.versions, spec.code, say) as code:

            async def ready(client: AgentClient) -> pb.PrepareReply:
                reply, _ = await asyncio.gather(prepare(client, spec, self.job.run), code.supply(client))
                return reply

            async def prepare_machine(machine: Machine, client: AgentClient) -> pb.PrepareReply:
                return await asked_of(client, partial(ready, client), probed=self.probed, patience_s=self.patience_s)

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
    """What a job's fork servers have imported, with versions, as the first machine says that answers.

    Args:
        agents: Clients by address.
        job: Its name.
        machines: On which it was prepared.

    Returns:
        Empty: none of them says it.
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
