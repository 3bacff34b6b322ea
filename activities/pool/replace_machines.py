"""An incident asks the pool for machines in the places of those that are to leave its job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import Activity, Bounds, within
from activities.heartbeat import Say
from activities.pool.update_pool import POOL_LIMIT, update_pool
from everstep.base.text import listed
from everstep.model.pool import Replaced, ReplaceRequest

if TYPE_CHECKING:
    from activities.tools import Tools


class ReplaceMachines(Activity[Replaced]):
    """Ask for the machines: for all of them, or for none."""

    name = "Replace machines"

    request: ReplaceRequest

    def line(self) -> str:
        return listed([f"{eviction.machine} ({eviction.reason})" for eviction in self.request.evict], 4)

    def bounds(self) -> Bounds:
        return within(POOL_LIMIT)

    async def perform(self, tools: Tools, say: Say) -> Replaced:
        return await update_pool(activity.client(), activity.info().task_queue, "replace", self.request, Replaced)
