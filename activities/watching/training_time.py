"""Computes the share of time in which each job trained, for its workflow's search attributes and for metrics.

This loop runs in every worker. It stores nothing: the share is computed again from the ledger, and a workflow accepts
each share from one worker only.
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
from everstep.base.log_once import LoggedErrors
from everstep.decisions.training_time.ettr import WINDOW_S
from everstep.model.job_state import SHOWN_ALREADY, ShareTrained

LOOK_S = 30.0
"""The time between two polls, seconds. It is short enough, because it is less than 1 % of the last hour."""
ANSWER_LIMIT = timedelta(seconds=5)
"""A workflow that does not answer within this time gets the share at the next poll."""
QUIET_S = 10.0
"""A job that makes no step for this long, seconds, counts as not training since its last step. ``everstep status`` uses
the same rule."""

log = structlog.get_logger("training time")


class TrainingTimes:
    """The training times of all jobs that a worker watches.

    Args:
        client: The client of Temporal.
        ledger: The ledger with the times of the jobs.
        watched: Id of a job's workflow → the watcher's view of the job; the mapping may change at any time.
    """

    def __init__(self, client: Client, ledger: Ledger, watched: Mapping[str, JobView]) -> None:
        self._client = client
        self._ledger = ledger
        self._watched = watched
        self.spent: dict[str, tuple[TimeSpent, TimeSpent]] = {}
        """Id of a job's workflow → how it spent its time since its start, and in the last hour."""
        self._sent: dict[str, ShareTrained] = {}
        self._troubles = LoggedErrors()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Poll all jobs once; a failed poll of a job is repeated at the next call."""
        jobs = dict(self._watched)
        for workflow_id in {*self.spent, *self._sent} - jobs.keys():
            self.spent.pop(workflow_id, None)
            self._sent.pop(workflow_id, None)
        for workflow_id, job in jobs.items():
            try:
                await self._look_at(workflow_id, job)
            except Exception as error:  # an error of the ledger or of one workflow does not affect the others
                if self._troubles.is_new(workflow_id, error):
                    log.warning(
                        "the share of time in which a job trained is not known", job=workflow_id, error=str(error)
                    )
            else:
                self._troubles.recovered(workflow_id)

    async def _look_at(self, workflow_id: str, job: JobView) -> None:
        if not job.has_run:  # the ledger may only know an earlier run of this name
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
        if share != self._sent.get(workflow_id) and await self._send(workflow_id, share):
            self._sent[workflow_id] = share

    async def _send(self, workflow_id: str, share: ShareTrained) -> bool:
        """Send the share to the workflow. The result is True even if the workflow refuses the share or is gone: the
        same share is not sent again."""
        handle = self._client.get_workflow_handle(workflow_id)
        try:
            await handle.execute_update("trained", share, result_type=str, rpc_timeout=ANSWER_LIMIT)
        except WorkflowUpdateFailedError as error:
            shown = isinstance(error.cause, ApplicationError) and error.cause.type == SHOWN_ALREADY
            if not shown and self._troubles.is_new(f"sending to {workflow_id}", error.cause):
                log.info(
                    "a job does not accept the share of time in which it trained",
                    job=workflow_id,
                    error=str(error.cause),
                )
            return True
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
        return True
