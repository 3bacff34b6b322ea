"""Releases what jobs left on machines after their workflow ended.

A job that ends releases everything itself. What it cannot reach stays: an agent
was dead at that moment, or the workflow was terminated by hand. Every worker
looks for such remains, outside Temporal; several may do the same work.
A job that cannot be cleared does not delay another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError

from activities.turns import gathered
from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.base.log_once import Once
from everstep.errors import EverstepError
from everstep.model.job import owner_of
from everstep.model.job_state import JobState, jobs_query
from everstep.model.machine import Machine

log = structlog.get_logger("cleanup")

LOOK_S = 5.0
"""Between two looks at the list of jobs, seconds."""
LONGEST_S = 10.0
"""Longest wait before machines that did not answer are asked again, seconds."""
AT_ONCE = 64
"""Machines of one job that are asked side by side."""
QUERIES_AT_ONCE = 8
"""Jobs that are asked side by side where they ran: each of them is replayed for that."""
ANSWER_LIMIT = timedelta(seconds=5)
"""A workflow that does not say within this time where it ran is asked again."""
SETTLE = timedelta(seconds=5)
"""So long after its end a job is looked at first: a last activity may still be under way."""
REMEMBERED = timedelta(days=3)
"""Jobs that ended longer ago are not looked at any more."""


@dataclass(slots=True)
class Remains:
    """What may be left of one run of a job."""

    workflow_id: str
    run: str
    """Of the workflow."""
    state: JobState | None = None
    """None: the workflow did not say yet."""
    missing: list[Machine] | None = None
    """Machines that did not answer yet; None: none was asked."""
    wait_s: float = 0.0
    due: float = 0.0
    """When they are asked again, on the monotonic clock."""
    attending: asyncio.Task[None] | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing is left anywhere."""
        return self.missing is not None and not self.missing


class LeftoverCleaner:
    """Looks for remains of a task queue's jobs that are over, until it is cancelled."""

    def __init__(
        self,
        client: Client,
        agents: AgentClients,
        task_queue: str,
        settle: timedelta = SETTLE,
        again_s: float = LOOK_S,
    ) -> None:
        self._client = client
        self._task_queue = task_queue
        self._agents = agents
        self._settle = settle
        self._again_s = again_s
        self._remains: dict[str, Remains] = {}
        """By the run of the workflow: all that ended lately."""
        self._troubles = Once()
        self._asking = asyncio.Semaphore(QUERIES_AT_ONCE)

    async def run(self) -> None:
        """Look again and again; a machine that does not answer is asked at a later look."""
        try:
            while True:
                with contextlib.suppress(RPCError):
                    await self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            for remains in self._remains.values():
                if remains.attending:
                    remains.attending.cancel()

    async def look(self) -> list[asyncio.Task[None]]:
        """Look once at every job that ended lately and is not known to be clean, if it is its time.

        Returns:
            What was begun, one task for each job; a slow one must not hold up the next look.
        """
        since = (datetime.now(UTC) - REMEMBERED).isoformat()
        # A run that continued as new is not over: the next one goes on with what it has.
        over = f'ExecutionStatus!="Running" AND ExecutionStatus!="ContinuedAsNew" AND CloseTime>"{since}"'
        query = jobs_query(self._task_queue, over)
        listed: dict[str, Remains] = {}
        async for workflow in self._client.list_workflows(query):
            if workflow.close_time is not None and datetime.now(UTC) - workflow.close_time > self._settle:
                run = workflow.run_id
                listed[run] = self._remains.get(run) or Remains(workflow.id, run)
        self._remains = listed
        begun = []
        for remains in listed.values():
            busy = remains.attending is not None and not remains.attending.done()
            if not remains.clean and not busy and time.monotonic() >= remains.due:
                remains.attending = asyncio.create_task(self._attend(remains))
                begun.append(remains.attending)
        return begun

    async def _attend(self, remains: Remains) -> None:
        """Clear one job. An error concerns this job only, and each kind of error is logged once."""
        try:
            await self._clear(remains)
        except Exception as error:
            if self._troubles.new(remains.run, error):
                log.warning(
                    "a job that is over cannot be cleared; it is tried again",
                    workflow=remains.workflow_id,
                    error=str(error),
                )
        if remains.clean:
            self._troubles.recovered(remains.run)
            remains.state = None
        else:
            remains.wait_s = min(2 * remains.wait_s, LONGEST_S) or self._again_s
            remains.due = time.monotonic() + remains.wait_s

    async def _clear(self, remains: Remains) -> None:
        """Clear a job's machines, those that did not answer before."""
        newest = await self._client.get_workflow_handle(remains.workflow_id).describe()
        name_is_used = newest.run_id != remains.run
        if not name_is_used and newest.status == WorkflowExecutionStatus.RUNNING:
            return
        if remains.state is None:
            async with self._asking:
                handle = self._client.get_workflow_handle(remains.workflow_id, run_id=remains.run)
                remains.state = await handle.query("state", result_type=JobState, rpc_timeout=ANSWER_LIMIT)
        state = remains.state
        asked = state.machines if remains.missing is None else remains.missing
        room = asyncio.Semaphore(AT_ONCE)

        async def clear_machine(machine: Machine) -> bool:
            async with room:
                return await self._clear_machine(state.spec.name, state.run, machine, name_is_used=name_is_used)

        answered = await gathered(map(clear_machine, asked))
        remains.missing = [machine for machine, ok in zip(asked, answered, strict=True) if not ok]
        if remains.missing:
            log.debug("machines did not answer", job=state.spec.name, machines=len(remains.missing))

    async def _clear_machine(self, job: str, run: str, machine: Machine, *, name_is_used: bool) -> bool:
        try:
            agent = self._agents.get(machine.address)
            for left in [known for known in (await agent.describe()).jobs if owner_of(known.job) == job]:
                if left.run and left.run != run:
                    continue
                if name_is_used and not (left.run and run):
                    continue  # of a release that gave no ids: it may be the other run's
                log.warning(
                    "ending what a job left behind", job=left.job, machine=machine.name, generation=left.generation
                )
                request = pb.ReleaseRequest(request_id=f"cleanup-{uuid.uuid4().hex}", job=left.job, run=run)
                await agent.release(request, timeout_s=30)
        except EverstepError:
            return False
        return True
