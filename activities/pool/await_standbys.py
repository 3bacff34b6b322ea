"""Await standbys: an incident waits until the pool has enough free machines."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say
from activities.pool.update_pool import ANSWER_LIMIT, ASK_AGAIN_S
from everstep.model.pool import PoolState, pool_workflow_id

if TYPE_CHECKING:
    from activities.tools import Tools


class AwaitStandbys(Activity[int]):
    """Wait until the pool has a number of free machines; the result is how many it has."""

    name = "Await standbys"

    count: int
    patience_s: float

    def line(self) -> str:
        return f"{self.count} to spare"

    def bounds(self) -> Bounds:
        return twice(timedelta(seconds=self.patience_s) + timedelta(minutes=1))

    async def perform(self, tools: Tools, say: Say) -> int:
        clock = asyncio.get_running_loop()
        until_s = clock.time() + self.patience_s
        handle = activity.client().get_workflow_handle(pool_workflow_id(activity.info().task_queue))
        while True:
            state: PoolState = await handle.query("state", result_type=PoolState, rpc_timeout=ANSWER_LIMIT)
            if state.spare >= self.count or clock.time() >= until_s:
                return state.spare
            say(f"{state.spare} of {self.count} machines are to spare")
            await asyncio.sleep(ASK_AGAIN_S)
