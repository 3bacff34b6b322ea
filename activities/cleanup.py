"""Gives back what jobs left behind whose workflow is over.

A job that ends gives everything back itself. What it cannot reach stays: its
agent was dead at that moment, or its workflow was terminated by hand. Every
worker looks for such remains, outside Temporal; what it does may be done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from datetime import UTC, datetime, timedelta

import structlog
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.service import RPCError

from agent.client import AgentPool
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError
from everstep.job_state import JobState
from everstep.machine import Machine

log = structlog.get_logger("cleanup")

LOOK_S = 5.0
"""Between two looks, seconds (ours)."""
SETTLE = timedelta(seconds=5)
"""So long after its end a job is looked at first: a last activity may still be under way (ours)."""
REMEMBERED = timedelta(days=3)
"""Jobs that ended longer ago are not looked at any more (ours)."""


class Cleanup:
    """Looks for remains of jobs that are over, until it is cancelled."""

    def __init__(self, client: Client, agents: AgentPool, settle: timedelta = SETTLE) -> None:
        self._client = client
        self._agents = agents
        self._settle = settle
        self._clean: set[str] = set()
        """Runs of which nothing is left anywhere."""

    async def run(self) -> None:
        """Look again and again; a machine that does not answer is asked at the next look."""
        while True:
            with contextlib.suppress(RPCError):
                await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look once at every job that ended lately."""
        since = (datetime.now(UTC) - REMEMBERED).isoformat()
        query = f'WorkflowType="Job" AND ExecutionStatus!="Running" AND CloseTime>"{since}"'
        async for found in self._client.list_workflows(query):
            done = found.close_time is not None and datetime.now(UTC) - found.close_time > self._settle
            if done and found.run_id not in self._clean and await self._clear(found.id, found.run_id):
                self._clean.add(found.run_id)

    async def _clear(self, workflow_id: str, run: str) -> bool:
        """Clear one job's machines; returns whether all of them answered."""
        newest = await self._client.get_workflow_handle(workflow_id).describe()
        if newest.run_id != run:
            return True  # another run has the name, and what is there belongs to it
        if newest.status == WorkflowExecutionStatus.RUNNING:
            return False
        try:
            state = await self._client.get_workflow_handle(workflow_id, run_id=run).query("state", result_type=JobState)
        except (RPCError, WorkflowQueryFailedError) as error:
            log.warning("a job that is over cannot say where it ran", workflow=workflow_id, error=str(error))
            return False
        clearing = (self._clear_machine(state.spec.name, state.run, one) for one in state.machines)
        answered = await asyncio.gather(*clearing)
        return all(answered)

    async def _clear_machine(self, job: str, run: str, machine: Machine) -> bool:
        agent = self._agents.get(machine.address)
        try:
            left = next((one for one in (await agent.describe()).jobs if one.job == job), None)
            if left is None:
                return True
            log.warning("ending what a job left behind", job=job, machine=machine.name, generation=left.generation)
            request = pb.ReleaseRequest(request_id=f"cleanup-{uuid.uuid4().hex}", job=job, run=run)
            await agent.release(request, timeout_s=30)
        except AgentError:
            return False
        return True
