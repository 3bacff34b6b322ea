"""Ready standbys: bring the code of running jobs to idle machines before they are needed."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import FEW_TRIES, Activity, Bounds, within
from activities.agents.check_version import last_line, try_request
from activities.heartbeat import Say
from activities.turns import gathered
from everstep.base.text import listed
from everstep.errors import AgentError, AgentUnreachable, ConfigError
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, job_workflow_id
from everstep.model.machine import Machine
from everstep.model.pool import ReadyRequest, ReadyResult
from everstep.model.version import CodeVersion

if TYPE_CHECKING:
    from activities.agents.ship import Shipment
    from activities.tools import Tools

LIMIT = timedelta(minutes=10)
"""The time limit; machines that exceed it are not tried again for the same version."""
AT_ONCE = 4
"""The largest number of machines that are made ready at the same time. It is small because this work is not urgent, and
jobs need the worker."""
TRY_S = 120.0
"""The longest wait for a script to reach its call of ``join``, seconds."""
JOB_ANSWER = timedelta(seconds=5)
"""A job that does not report its version within this time is asked again at the next poll."""


class ReadyStandbys(Activity[ReadyResult]):
    """Bring a version to machines and try it there. Nothing is done if the job has a newer version by now; the next
    poll requests that version."""

    name = "Ready standbys"

    request: ReadyRequest

    def line(self) -> str:
        return f"{self.request.job}: {listed([machine.name for machine in self.request.machines])}"

    def bounds(self) -> Bounds:
        return within(LIMIT, FEW_TRIES)

    async def perform(self, tools: Tools, say: Say) -> ReadyResult:
        from activities.agents.ship import Shipment

        handle = activity.client().get_workflow_handle(job_workflow_id(self.request.job))
        state: JobState = await handle.query("state", result_type=JobState, rpc_timeout=JOB_ANSWER)
        spec = state.spec
        if CodeVersion.of(spec).id != self.request.version or not spec.code or state.status != "running":
            return ReadyResult()
        room, found = asyncio.Semaphore(AT_ONCE), ReadyResult()
        async with Shipment(tools.versions, spec.code, say) as shipment:

            async def make_ready(machine: Machine) -> None:
                async with room:
                    try:
                        found.machines[machine.name] = await self._on(tools, machine, spec, shipment)
                    except AgentUnreachable:
                        return  # the next poll reads the job's version

            await gathered(map(make_ready, self.request.machines))
        return found

    async def _on(self, tools: Tools, machine: Machine, spec: JobSpec, shipment: Shipment) -> str:
        """Bring a version to one machine and try it there; returns its problem, or an empty text."""
        from agent.v1 import agent_pb2 as pb

        client = tools.agents.get(machine.address)
        try:
            await shipment.supply(client)
            reply = await client.try_code(try_request(spec, 0, TRY_S), timeout_s=TRY_S * 1.5)
        except AgentUnreachable:
            raise
        except (ConfigError, AgentError) as error:
            return str(error)
        return last_line(reply.text) if reply.outcome == pb.TryCodeReply.FAILED else ""
