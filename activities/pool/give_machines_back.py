"""Give machines back: a job that has ended returns its machines to the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import Activity, Bounds, within
from activities.heartbeat import Say
from activities.pool.update_pool import POOL_LIMIT, update_pool
from everstep.model.pool import GiveBack

if TYPE_CHECKING:
    from activities.tools import Tools


class GiveMachinesBack(Activity[int]):
    """Report to the pool that a job has left its machines; the result is how many the job had."""

    name = "Give machines back"

    request: GiveBack

    def line(self) -> str:
        return self.request.job

    def bounds(self) -> Bounds:
        return within(POOL_LIMIT)

    async def perform(self, tools: Tools, say: Say) -> int:
        return await update_pool(activity.client(), activity.info().task_queue, "give_back", self.request, int)
