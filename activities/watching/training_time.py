"""How much of its time each job trained: told to its workflow, whose search attributes show it, and kept for metrics.

A loop in every worker. It keeps nothing that matters: what it tells is computed anew from the ledger, and a workflow
takes it from one worker only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import timedelta

import structlog
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.ledger.ledger import Ledger
from activities.ledger.time_spent import TimeSpent
from activities.watching.job_view import JobView
from everstep.base.log_once import Once
from everstep.decisions.training_time.ettr import WINDOW_S
from everstep.model.job_state import SHOWN_ALREADY, ShareTrained

LOOK_S = 30.0
"""Between two looks, seconds: a minute of an hour is 2 % of it."""
ANSWER_LIMIT = timedelta(seconds=5)
"""A workflow that does not answer within this time is told at the next look."""
QUIET_S = 10.0
"""Where no rank steps for so long, the job does not train since then (as ``everstep status`` has it)."""

log = structlog.get_logger("training time")


class TrainingTimes:
    """The time of all jobs that a worker watches.

    Args:
        client: Of Temporal.
        ledger: Knows when they trained.
        watched: Job's workflow → what is known of it; it changes meanwhile.
    """

    def __init__(self, client: Client, ledger: Ledger, watched: Mapping[str, JobView]) -> None:
        self._client = client
        self._ledger = ledger
        self._watched = watched
        self.spent: dict[str, tuple[TimeSpent, TimeSpent]] = {}
        """Job's workflow → how it spent its time since its start, and in the last hour."""
        self._told: dict[str, ShareTrained] = {}
        self._troubles = Once()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look once at all jobs; one that cannot be looked at now is looked at the next time."""
        jobs = dict(self._watched)
        for workflow_id in {*self.spent, *self._told} - jobs.keys():
            self.spent.pop(workflow_id, None)
            self._told.pop(workflow_id, None)
        for workflow_id, job in jobs.items():
            try:
                await self._look_at(workflow_id, job)
            except Exception as error:  # the ledger, or one workflow: the others are looked at all the same
                if self._troubles.new(workflow_id, error):
                    log.warning("how much of its time a job trained is not known", job=workflow_id, error=str(error))
            else:
                self._troubles.recovered(workflow_id)

    async def _look_at(self, workflow_id: str, job: JobView) -> None:
        if not job.has_run:  # the ledger may know an earlier run of this name only
            return
        now_ns, quiet_s = time.time_ns(), job.quiet_s
        spent = await self._ledger.call(
            Ledger.time_spent,
            job.spec.name,
            now_ns=now_ns,
            since_ns=(None, now_ns - round(WINDOW_S * 1e9)),
            quiet_since_ns=now_ns - round(quiet_s * 1e9) if quiet_s >= QUIET_S else None,
        )
        if not spent:
            return
        since_start, last_hour = spent
        self.spent[workflow_id] = since_start, last_hour
        share = ShareTrained.shown(since_start.ettr.ratio, last_hour.ettr.ratio)
        if share != self._told.get(workflow_id) and await self._tell(workflow_id, share):
            self._told[workflow_id] = share

    async def _tell(self, workflow_id: str, share: ShareTrained) -> bool:
        """Whether the workflow shows it now, or need not any more."""
        handle = self._client.get_workflow_handle(workflow_id)
        try:
            await handle.execute_update("trained", share, result_type=str, rpc_timeout=ANSWER_LIMIT)
        except WorkflowUpdateFailedError as error:
            shown = isinstance(error.cause, ApplicationError) and error.cause.type == SHOWN_ALREADY
            if not shown and self._troubles.new(f"telling {workflow_id}", error.cause):
                log.info("a job does not show how much of its time it trained", job=workflow_id, error=str(error.cause))
            return True
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
        return True
