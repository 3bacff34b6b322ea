"""The activity that delivers a notice to one receiver."""

from __future__ import annotations

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities import messages
from activities.heartbeat import heartbeating
from activities.messages import DeliverInput
from activities.notices.deliver import deliver
from activities.notices.settings import NoticeSettings
from everstep.errors import NoticeError

NOT_TAKEN = "NotTaken"
"""Type of the error by which a receiver that did not take a notice is told."""


class NoticeActivities:
    """Knows the receivers of this worker."""

    def __init__(self, settings: NoticeSettings) -> None:
        self._settings = settings

    @activity.defn(name=messages.DELIVER)
    async def deliver(self, given: DeliverInput) -> str:
        """Deliver a notice once; returns what came back.

        Raises:
            ApplicationError: it was not taken; it may be later.
        """
        receiver = self._settings.named(given.receiver)
        if receiver is None:
            why = f"the worker that tried has no receiver {given.receiver!r}: give all workers the same file"
            raise ApplicationError(why, type=NOT_TAKEN)
        try:
            async with heartbeating():
                return await deliver(receiver, given.notice)
        except NoticeError as error:
            raise ApplicationError(str(error), type=NOT_TAKEN) from None
