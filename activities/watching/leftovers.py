"""Releases the ranks and memory that jobs left on machines after their workflow ended.

A job that ends releases everything itself. But ranks or memory stay if an agent was dead at that moment, or if the
workflow was terminated by hand. Every worker releases such remains, outside Temporal; several workers may do so for the
same job. A job whose remains cannot be released does not delay another job.
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
from everstep.base.log_once import LoggedErrors
from everstep.errors import EverstepError
from everstep.model.job import owner_of
from everstep.model.job_state import JobState, jobs_query
from everstep.model.machine import Machine

log = structlog.get_logger("cleanup")

LOOK_S = 5.0
"""The time between two polls of the list of jobs, seconds."""
LONGEST_S = 10.0
"""The longest wait before silent machines are asked again, seconds."""
AT_ONCE = 64
"""The largest number of machines of one job that are asked at the same time."""
QUERIES_AT_ONCE = 8
"""The largest number of jobs that are queried at the same time, because a query replays the workflow."""
ANSWER_LIMIT = timedelta(seconds=5)
"""A workflow that does not answer within this time is asked again."""
SETTLE = timedelta(seconds=5)
"""The time between a job's end and its first check: a last activity may still run."""
REMEMBERED = timedelta(days=3)
"""Jobs that ended longer ago are not checked any more."""


@dataclass(slots=True)
class Remains:
    """The possible remains of one run of a job on machines."""

    workflow_id: str
    run: str
    """The run id of the workflow."""
    state: JobState | None = None
    """The job's state; None: the workflow has not answered yet."""
    missing: list[Machine] | None = None
    """Machines that have not answered yet; None: no machine was asked."""
    wait_s: float = 0.0
    due: float = 0.0
    """The time of the next attempt, on the monotonic clock, seconds."""
    attending: asyncio.Task[None] | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing is left on any machine."""
        return self.missing is not None and not self.missing


class LeftoverCleaner:
    """Cleans up after closed jobs of a task queue, until it is cancelled."""

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
        """Run id of the workflow → what the job may have left, for all jobs that ended lately."""
        self._troubles = LoggedErrors()
        self._asking = asyncio.Semaphore(QUERIES_AT_ONCE)

    async def run(self) -> None:
        """Poll until cancelled; a machine that does not answer is asked at a later poll."""
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
        """Check each job that ended lately, is not known to be clean, and is due.

        Returns:
            One task for each job; a slow task must not delay the next poll.
        """
        since = (datetime.now(UTC) - REMEMBERED).isoformat()
        # A run that continued as new is not over: the next run uses its machines.
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
        """Clear one job. An error affects this job only, and each kind of error is logged once."""
        try:
            await self._clear(remains)
        except Exception as error:
            if self._troubles.is_new(remains.run, error):
                log.warning(
                    "what a closed job left on machines cannot be released; it is tried again",
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
        """Clear the job's machines that have not answered yet."""
        newest = await self._client.get_workflow_handle(remains.workflow_id).describe()
        name_in_use = newest.run_id != remains.run
        if not name_in_use and newest.status == WorkflowExecutionStatus.RUNNING:
            return
        if remains.state is None:
            async with self._asking:
                handle = self._client.get_workflow_handle(remains.workflow_id, run_id=remains.run)
                remains.state = await handle.query("state", result_type=JobState, rpc_timeout=ANSWER_LIMIT)
        state = remains.state
        if newest.status == WorkflowExecutionStatus.RUNNING and await self._has_run(remains.workflow_id, state.run):
            return  # the workflow was reset: the job continues
        asked = state.machines if remains.missing is None else remains.missing
        room = asyncio.Semaphore(AT_ONCE)

        async def clear_machine(machine: Machine) -> bool:
            async with room:
                return await self._clear_machine(state.spec.name, state.run, machine, name_in_use=name_in_use)

        answered = await gathered(map(clear_machine, asked))
        remains.missing = [machine for machine, ok in zip(asked, answered, strict=True) if not ok]
        if remains.missing:
            log.debug("machines did not answer", job=state.spec.name, machines=len(remains.missing))

    async def _has_run(self, workflow_id: str, run: str) -> bool:
        """Return whether the newest run of a workflow is the run of the job that has this id."""
        async with self._asking:
            handle = self._client.get_workflow_handle(workflow_id)
            newest: JobState = await handle.query("state", result_type=JobState, rpc_timeout=ANSWER_LIMIT)
        return newest.run == run

    async def _clear_machine(self, job: str, run: str, machine: Machine, *, name_in_use: bool) -> bool:
        try:
            agent = self._agents.get(machine.address)
            for left in [known for known in (await agent.describe()).jobs if owner_of(known.job) == job]:
                if left.run and left.run != run:
                    continue
                if name_in_use and not (left.run and run):
                    continue  # without run ids, it is not known to which run this belongs
                log.warning(
                    "releasing what a closed job left on a machine",
                    job=left.job,
                    machine=machine.name,
                    generation=left.generation,
                )
                request = pb.ReleaseRequest(request_id=f"cleanup-{uuid.uuid4().hex}", job=left.job, run=run)
                await agent.release(request, timeout_s=30)
        except EverstepError:
            return False
        return True
