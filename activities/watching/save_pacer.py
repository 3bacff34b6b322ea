"""Makes the ranks of one job save after as many steps as the slowest of them needs, in moves that all of them make."""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from activities.turns import ShareOfTime
from activities.watching.copy_requests import ASK_S, copy_requests
from activities.watching.job_view import JobView
from agent.client import AgentClient, AgentClients
from agent.reporting.paced_saves import request_of

TICK_S = 0.5
"""The time between two checks of whether ranks have to move, seconds."""

log = structlog.get_logger("watcher")


class SavePacer:
    """Asks the agents of one job to move their ranks to another pace, while the job is watched."""

    def __init__(self, agents: AgentClients, job: JobView) -> None:
        self._agents = agents
        self._job = job

    async def run(self) -> None:
        """Ask the agents until the ranks have moved; never returns."""
        job, pace, last = self._job, ShareOfTime(), None
        async with copy_requests(self._agents, job.machines) as ask:
            while True:
                pace.begin()
                pacing = job.pace_saves()
                pace.end()
                if pacing:
                    generation, order = pacing
                    if order.following != last:
                        to = last = order.following
                        log.info("pacing saves", generation=generation, move=to.number, every=to.every, waits=to.waits)
                    request = request_of(job.spec.name, generation, order)
                    ask(partial(AgentClient.pace_saves, request=request, timeout_s=ASK_S))
                await pace.rest()
                await asyncio.sleep(TICK_S)
