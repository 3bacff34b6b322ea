"""Lease machines: a job that starts leases its machines from the pool."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import Activity, Bounds
from activities.heartbeat import Say
from activities.pool.update_pool import ASK_AGAIN_S, update_pool
from everstep.base.text import listed
from everstep.model.pool import Leased, LeaseRequest

if TYPE_CHECKING:
    from activities.tools import Tools

REFUSED_S = 10.0
"""A machine that belongs to another job is requested again for this long, seconds: that job may just have ended."""


class LeaseMachines(Activity[Leased]):
    """Lease the machines of a job that starts; machines of other jobs are requested again for a while.

    The activity waits for a pool that does not answer, because no two jobs may share a machine.
    """

    name = "Lease machines"

    request: LeaseRequest

    def line(self) -> str:
        return listed([machine.name for machine in self.request.machines])

    def bounds(self) -> Bounds:
        return Bounds(timedelta(minutes=1), None)

    async def perform(self, tools: Tools, say: Say) -> Leased:
        clock = asyncio.get_running_loop()
        until_s = clock.time() + REFUSED_S
        while True:
            leased = await update_pool(activity.client(), activity.info().task_queue, "lease", self.request, Leased)
            if not leased.may_change or clock.time() >= until_s:
                return leased
            say("; ".join(f"{name}: {why}" for name, why in leased.refused.items())[:300])
            await asyncio.sleep(ASK_AGAIN_S)
