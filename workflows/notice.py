"""The notice: a workflow that notifies each receiver of one event, and repeats failed deliveries.

The id of the workflow contains the id of the event, so an event is delivered once, however many workers see it.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError

with workflow.unsafe.imports_passed_through():
    from activities.deliver_notice import DeliverNotice
    from everstep.model.notice import NOTICE_WORKFLOW, NoticeInput, NoticeResult
    from workflows import attributes, web_ui
    from workflows.start_activity import start_activity


@workflow.defn(name=NOTICE_WORKFLOW)
class NoticeWorkflow:
    """The deliveries of one event."""

    @workflow.run
    async def run(self, input: NoticeInput) -> NoticeResult:
        """Notify all receivers at once; a silent receiver delays no other."""
        notice = input.notice
        workflow.set_current_details(f"## {notice.kind}\n\n{notice.text}")
        if notice.job:
            workflow.upsert_search_attributes(attributes.updates({attributes.JOB_NAME: notice.job}))
        accepted: dict[str, str] = {}
        failed: dict[str, str] = {}
        for name, ok, answer in await asyncio.gather(*(self._deliver(input, name) for name in input.receivers)):
            (accepted if ok else failed)[name] = answer
        parts = [f"notified {', '.join(accepted)}"] if accepted else []
        parts += [f"{name} was not notified: {why}" for name, why in failed.items()]
        return NoticeResult(headline=web_ui.summary("; ".join(parts)), taken=accepted, failed=failed)

    async def _deliver(self, input: NoticeInput, receiver: str) -> tuple[str, bool, str]:
        try:
            answer: str = await start_activity(
                DeliverNotice(notice=input.notice, receiver=receiver, patience_s=input.patience_s)
            )
        except ActivityError as error:
            why = error.cause.message if isinstance(error.cause, FailureError) else str(error)
            workflow.logger.warning(
                "a receiver was not notified", extra={"receiver": receiver, "event": input.notice.id, "error": why}
            )
            return receiver, False, why
        return receiver, True, answer
