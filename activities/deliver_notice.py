"""Deliver notice: deliver a notice to one receiver."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

from activities.activity import Activity, Bounds
from activities.heartbeat import Say
from activities.notices.settings import LONGEST_S
from everstep.errors import NoticeError
from everstep.model.notice import Notice

if TYPE_CHECKING:
    from activities.tools import Tools

PATIENT_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=2.0, maximum_interval=timedelta(minutes=10)
)
"""Retries are quick at first, then slow enough for a receiver that is away for hours."""
NOT_ACCEPTED = "NotTaken"
"""The error type of a receiver that does not accept a notice."""


class DeliverNotice(Activity[str]):
    """Deliver a notice once; the result is the receiver's answer.

    Raises:
        ApplicationError: the notice was not accepted; a later attempt may succeed.
    """

    name = "Deliver notice"

    notice: Notice
    receiver: str
    """The name of the receiver in the file of receivers."""
    patience_s: float
    """Failed deliveries are repeated for this long, seconds."""

    def line(self) -> str:
        return self.receiver

    def bounds(self) -> Bounds:
        return Bounds(timedelta(seconds=2 * LONGEST_S), timedelta(seconds=self.patience_s), PATIENT_RETRY)

    async def perform(self, tools: Tools, say: Say) -> str:
        from activities.notices.deliver import deliver

        receiver = tools.notices.named(self.receiver) if tools.notices else None
        if receiver is None:
            why = f"this worker has no receiver {self.receiver!r}: start all workers with the same file of receivers"
            raise ApplicationError(why, type=NOT_ACCEPTED)
        try:
            return await deliver(receiver, self.notice)
        except NoticeError as error:
            raise ApplicationError(str(error), type=NOT_ACCEPTED) from None
