"""Idle machines get the code that jobs run, before one of them takes another's place."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import activity

from activities import messages
from activities.agents.check_version import last_line, try_request
from activities.agents.ship import Shipment
from activities.heartbeat import heartbeating
from activities.messages import CheckVersionInput
from activities.turns import gathered
from activities.versions.store import VersionStore
from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, AgentUnreachable, ConfigError
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, job_workflow_id
from everstep.model.machine import Machine
from everstep.model.pool import Readied, ReadyRequest
from everstep.model.version import CodeVersion

AT_ONCE = 4
"""Machines that are made ready side by side: nobody waits for them, and jobs need the worker."""
TRY_S = 120.0
"""A script that has not come to where it joins its job after this long is left there, seconds."""
JOB_ANSWER = timedelta(seconds=5)
"""A job that does not say what it runs within this time is asked with the next look."""


class ReadyActivities:
    """Makes idle machines ready.

    Args:
        agents: Clients by address.
        store: Of versions; None: there is none, and no machine gets any.
    """

    def __init__(self, agents: AgentClients, store: VersionStore | None) -> None:
        self._agents = agents
        self._store = store

    @activity.defn(name=messages.POOL_READY)
    async def ready(self, request: ReadyRequest) -> Readied:
        """Bring a version to machines and try it there; a job that runs another one by now is left to the next look."""
        async with heartbeating() as say:
            handle = activity.client().get_workflow_handle(job_workflow_id(request.job))
            state: JobState = await handle.query("state", result_type=JobState, rpc_timeout=JOB_ANSWER)
            spec = state.spec
            if CodeVersion.of(spec).id != request.version or not spec.code or state.status != "running":
                return Readied()
            room, found = asyncio.Semaphore(AT_ONCE), Readied()
            async with Shipment(self._store, spec.code, say) as shipment:

                async def make_ready(machine: Machine) -> None:
                    async with room:
                        try:
                            found.machines[machine.name] = await self._on(machine, spec, state.run, shipment)
                        except AgentUnreachable:
                            return  # the next look says what it is

                await gathered(map(make_ready, request.machines))
            return found

    async def _on(self, machine: Machine, spec: JobSpec, run: str, shipment: Shipment) -> str:
        """What was found against a version on one machine; empty: nothing."""
        client = self._agents.get(machine.address)
        given = CheckVersionInput(spec=spec, machines=[machine], run=run, timeout_s=TRY_S)
        try:
            await shipment.supply(client)
            reply = await client.try_code(try_request(given, 0), timeout_s=TRY_S * 1.5)
        except AgentUnreachable:
            raise
        except (ConfigError, AgentError) as error:
            return str(error)
        return last_line(reply.text) if reply.outcome == pb.TryCodeReply.FAILED else ""
