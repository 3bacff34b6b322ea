"""Acknowledges observations to agents, which may then drop them; a silent agent is not awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from activities.turns import in_turns
from activities.watching.job_view import JobView
from agent.client import AgentClients
from agent.reporting.observations import OF_NO_JOB
from agent.v1 import agent_pb2 as pb
from everstep.errors import EverstepError
from everstep.model.machine import Machine

ROUND_S = 0.5
"""The time between two checks for new acknowledgements, seconds."""
RETRY_S = 0.2
"""The first wait before an acknowledgement is sent again, seconds."""
ACKNOWLEDGE_S = 30.0
"""The time limit of an acknowledgement, and the longest wait before it is sent again, seconds."""

log = structlog.get_logger("watcher")


class Acknowledger:
    """Tells the agents of one job which observations have reached the workflow or the ledger.

    An observation that is not acknowledged is sent again to the next watcher. That does no harm, because the workflow
    accepts a report only once.

    Args:
        agents: The clients of the agents.
        job: The watcher's view of the job.
        watched: All jobs that this worker watches: a machine event concerns each job on the machine.
    """

    def __init__(self, agents: AgentClients, job: JobView, watched: Mapping[str, JobView]) -> None:
        self._agents = agents
        self._job = job
        self._watched = watched
        self._acknowledged: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        """Acknowledge until cancelled."""
        sending: dict[tuple[str, str], asyncio.Task[None]] = {}
        try:
            while True:
                async for machine in in_turns(self._job.machines):
                    for owner in (self._job.spec.name, OF_NO_JOB):
                        key = machine.name, owner
                        up_to_date = self._up_to(*key) in (0, self._acknowledged.get(key))
                        if not up_to_date and (key not in sending or sending[key].done()):
                            sending[key] = asyncio.create_task(self._send(machine, owner))
                await asyncio.sleep(ROUND_S)
        finally:
            for task in sending.values():
                task.cancel()

    def _up_to(self, machine: str, owner: str) -> int:
        """Return the number up to which all observations of a machine may be acknowledged; 0: none may."""
        up_to = self._job.acknowledgements.handled(machine, owner)
        if owner != OF_NO_JOB or not up_to:
            return up_to
        limits = (view.needs_no_more(machine) for view in (self._job, *self._watched.values()))
        return min([up_to, *(limit for limit in limits if limit is not None)])

    async def _send(self, machine: Machine, owner: str) -> None:
        wait_s, key = RETRY_S, (machine.name, owner)
        while (up_to := self._up_to(*key)) not in (0, self._acknowledged.get(key)):
            request = pb.AcknowledgeRequest(up_to_sequence=up_to, job=owner)
            try:
                await self._agents.get(machine.address).acknowledge(request, timeout_s=ACKNOWLEDGE_S)
                self._acknowledged[key] = up_to
                self._job.acknowledgements.acknowledged(*key, up_to)
            except EverstepError as error:
                log.debug("an agent did not receive an acknowledgement yet", machine=machine.name, error=str(error))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, ACKNOWLEDGE_S)
