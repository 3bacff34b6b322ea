"""A loop in every worker, which detects events that people must be notified of and starts the delivery of each event.

The loop stores no state. The delivery of an event is a workflow whose id contains the event's id, and Temporal never
starts it twice. So an event is delivered once, even if there are several workers or a worker is restarted, as long as
the namespace keeps closed workflows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import structlog
from temporalio.client import Client, WorkflowExecution, WorkflowExecutionStatus
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from activities.notices.settings import NoticeSettings
from activities.turns import gathered
from everstep.base.log_once import LoggedErrors
from everstep.decisions import notices
from everstep.decisions.notices import EndedJob, PacedJob
from everstep.model.job_state import job_workflow_id
from everstep.model.notice import NOTICE_WORKFLOW, Notice, NoticeInput, NoticeKind, notice_workflow_id
from everstep.model.pool import PoolState, pool_workflow_id
from everstep.model.stage import CurrentStage, Stage

log = structlog.get_logger("notices")

LOOK_S = 5.0
"""The time between two polls, seconds."""
SHORT_FOR_S = 60.0
"""People are notified of a shortage of machines once it has lasted this long, seconds."""
ANSWER_LIMIT = timedelta(seconds=5)
"""A workflow that does not answer within this time is asked again at the next poll."""
ASKED_AT_ONCE = 8
"""The largest number of workflows that are asked at the same time. It is small because a query may replay the
workflow."""
KEPT = 10_000
"""The number of events and workflows that are remembered, so that Temporal is not asked about them again."""
SUMMARY_CHARACTERS = 90
"""The largest number of characters in a line of the Web UI's list; Temporal accepts 400 bytes."""
PARKED = f'WorkflowType="Incident" AND ExecutionStatus="Running" AND Stage="{Stage.PARKED}"'
OBSERVED = f'WorkflowType="Incident" AND ExecutionStatus="Completed" AND Stage="{Stage.OBSERVED}"'
"""If the breaker trips while the ranks continue, the incident is completed at once."""
ENDED = 'WorkflowType="Job" AND ExecutionStatus!="Running" AND ExecutionStatus!="ContinuedAsNew"'
CLOSED_BY_TEMPORAL = {
    WorkflowExecutionStatus.FAILED: "it failed",
    WorkflowExecutionStatus.TERMINATED: "it was terminated",
    WorkflowExecutionStatus.TIMED_OUT: "its time ran out",
}
"""Status of a workflow that could not return an outcome itself → the outcome, as text."""

Ask = Callable[[WorkflowExecution], Awaitable[None]]


class RecentIds:
    """The ids that were added last."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._ids

    def add(self, id: str) -> None:
        """Add an id; the oldest id is dropped if there are too many."""
        self._ids[id] = None
        if len(self._ids) > KEPT:
            self._ids.pop(next(iter(self._ids)))


class Announcer:
    """Notifies people about the jobs, incidents and machines of one task queue, until it is cancelled.

    Args:
        client: The client of Temporal.
        settings: The receivers.
        task_queue: The cluster's task queue.
        ui_url: The address of Temporal's Web UI; empty: it is not known.
        paced_jobs: Returns the watched jobs whose pace of saves is known.
        short_for_s: People are notified of a shortage of machines once it has lasted this long, seconds.
    """

    def __init__(
        self,
        client: Client,
        settings: NoticeSettings,
        task_queue: str,
        ui_url: str = "",
        *,
        paced_jobs: Callable[[], Iterable[PacedJob]] = list,
        short_for_s: float = SHORT_FOR_S,
    ) -> None:
        self._client = client
        self._settings = settings
        self._task_queue = task_queue
        self._pages = f"{ui_url.rstrip('/')}/namespaces/{client.namespace}/workflows/" if ui_url else ""
        self._paced_jobs = paced_jobs
        self._short_for_s = short_for_s
        self._short: dict[str, float] = {}
        self._announced = RecentIds()
        self._over = RecentIds()
        """Runs of closed workflows that were asked already."""
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._troubles = LoggedErrors()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Poll once for all events that some receiver wants. No error is raised; each kind of error is logged once."""
        lately = f'CloseTime>"{(datetime.now(UTC) - timedelta(seconds=notices.LATE_S)).isoformat()}"'
        if self._wants(NoticeKind.PARKED, NoticeKind.BREAKER_TRIPPED):
            await self._succeeded("parked incidents", self._each(PARKED, self._ask_incident))
        if self._wants(NoticeKind.BREAKER_TRIPPED):
            await self._succeeded("observed incidents", self._each(f"{OBSERVED} AND {lately}", self._ask_incident))
        if self._wants(NoticeKind.JOB_FAILED):
            await self._succeeded("jobs that are over", self._each(f"{ENDED} AND {lately}", self._ask_job))
        if self._wants(NoticeKind.SAVES_CHANGED):
            await self._succeeded("saves of jobs", self._look_at_saves())
        if self._wants(NoticeKind.POOL_SHORT, NoticeKind.POOL_EMPTY, NoticeKind.EVICTED_TWICE):
            await self._succeeded("the pool of machines", self._ask_pool())

    def _wants(self, *kinds: NoticeKind) -> bool:
        return any(self._settings.for_kind(kind) for kind in kinds)

    async def _succeeded(self, subject: str, poll: Awaitable[None]) -> bool:
        """Return whether a poll succeeded; each kind of error is logged once."""
        try:
            await poll
        except Exception as error:
            if self._troubles.is_new(subject, error):
                log.warning("it is not known whether there are events", of=subject, error=str(error))
            return False
        self._troubles.recovered(subject)
        return True

    async def _each(self, condition: str, ask: Ask) -> None:
        """Ask each workflow that meets the condition; a closed workflow that has answered is not asked again."""
        query = f'TaskQueue="{self._task_queue}" AND {condition}'
        listed = [one async for one in self._client.list_workflows(query) if one.run_id not in self._over]

        async def ask_one(workflow: WorkflowExecution) -> None:
            async with self._asking:
                succeeded = await self._succeeded(workflow.run_id, ask(workflow))
            if succeeded and workflow.status is not WorkflowExecutionStatus.RUNNING:
                self._over.add(workflow.run_id)

        await gathered(map(ask_one, listed))

    async def _ask_incident(self, incident: WorkflowExecution) -> None:
        handle = self._client.get_workflow_handle(incident.id, run_id=incident.run_id)
        at_hand = await handle.query("stage", result_type=CurrentStage, rpc_timeout=ANSWER_LIMIT)
        await self._announce(notices.incident_notices(incident.id, at_hand), incident.id)

    async def _ask_job(self, job: WorkflowExecution) -> None:
        outcome = headline = ""
        if job.status is WorkflowExecutionStatus.COMPLETED:
            handle = self._client.get_workflow_handle(job.id, run_id=job.run_id, result_type=dict[str, Any])
            result = await handle.result(follow_runs=False, rpc_timeout=ANSWER_LIMIT)
            outcome, headline = str(result.get("outcome", "")), str(result.get("headline", ""))
        ended = EndedJob(
            name=job.id.removeprefix("job/"),
            run=job.run_id,
            ended_ns=int((job.close_time or datetime.now(UTC)).timestamp() * 1e9),
            outcome=outcome,
            headline=headline,
            closed_as=CLOSED_BY_TEMPORAL.get(job.status, "") if job.status else "",
        )
        await self._announce(notices.ended_job_notices(ended, time.time_ns()), job.id)

    async def _look_at_saves(self) -> None:
        for job in self._paced_jobs():
            await self._announce(notices.saves_changed_notices(job, time.time_ns()), job_workflow_id(job.name))

    async def _ask_pool(self) -> None:
        id = pool_workflow_id(self._task_queue)
        handle = self._client.get_workflow_handle(id)
        try:
            pool = await handle.query("state", result_type=PoolState, rpc_timeout=ANSWER_LIMIT)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return  # this cluster has no machine pool
            raise
        seen = notices.pool_notices(pool, time.time_ns())
        self._short, due = notices.lasting_notices(self._short, seen, time.monotonic(), self._short_for_s)
        await self._announce(due, id)

    async def _announce(self, events: Iterable[Notice], workflow: str) -> None:
        """Start the delivery of each new event; the notice has a link to ``workflow``."""
        for event in events:
            receivers = self._settings.for_kind(event.kind)
            if event.id in self._announced or not receivers:
                continue
            link = f"{self._pages}{quote(workflow, safe='')}" if self._pages else ""
            notice = event.model_copy(update={"cluster": self._task_queue, "link": link})
            try:
                await self._client.start_workflow(
                    NOTICE_WORKFLOW,
                    NoticeInput(notice=notice, receivers=receivers),
                    id=notice_workflow_id(self._task_queue, event.id),
                    task_queue=self._task_queue,
                    id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                    static_summary=event.text[:SUMMARY_CHARACTERS],
                )
                log.info(
                    "the delivery of a notice was started", kind=event.kind, event_id=event.id, receivers=receivers
                )
            except WorkflowAlreadyStartedError:
                log.debug("the delivery of a notice was started before", event_id=event.id)
            self._announced.add(event.id)
