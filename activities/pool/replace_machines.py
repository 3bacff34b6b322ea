"""Replace machines: an incident leases machines for those that must leave its job."""

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
    """Lease the replacements: all of them, or none."""

    name = "Replace machines"

    request: ReplaceRequest

    def line(self) -> str:
        return listed([f"{eviction.machine} ({eviction.reason})" for eviction in self.request.evict], 4)

    def bounds(self) -> Bounds:
        return within(POOL_LIMIT)

    async def perform(self, tools: Tools, say: Say) -> Replaced:
        return await update_pool(activity.client(), activity.info().task_queue, "replace", self.request, Replaced)
