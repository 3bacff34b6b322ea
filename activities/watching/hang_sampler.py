"""Samples the ranks of a job that does not step, to distinguish a hang from a long phase of the script.

A sample delays a rank by some milliseconds, so no sample is taken while the job steps as fast as before. Each watcher
takes its own samples, and an agent serves one sample at a time.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from activities.agents.looks import judge_looks, look
from activities.heartbeat import steady_ns
from activities.watching.job_view import JobView
from agent.client import AgentClients
from everstep.decisions.blame.hang.progress import HangCheck
from everstep.decisions.detect.hang import SAMPLE_AGAIN, apart_s, first_sample_s

TICK_S = 0.1
"""The time between two checks of how long no rank has stepped, seconds."""

LEAST_S = 0.3
"""The shortest time from the end of a sample to the next sample, seconds."""

log = structlog.get_logger("watcher")


class HangSampler:
    """Samples the ranks of one job while the job is watched."""

    def __init__(self, agents: AgentClients, job: JobView) -> None:
        self._agents = agents
        self._job = job

    async def run(self) -> None:
        """Sample when no rank has stepped for too long, and repeat while that lasts; never returns."""
        job = self._job
        seen, due_s = job.steps_seen, 0.0
        while True:
            await asyncio.sleep(TICK_S)
            facts = job.latest
            if facts is None or facts.generation in job.reported or facts.generation != job.steps_seen.generation:
                continue
            if seen != job.steps_seen:
                seen, due_s = job.steps_seen, 0.0
            first_s = first_sample_s(facts)
            if first_s is None or not facts.quiet_s:
                continue
            quiet_s = facts.quiet_s + max(steady_ns() - facts.now_ns, 0) / 1e9
            if quiet_s < max(first_s, due_s):
                continue
            check = await self._twice(apart_s(facts.typical_step_s))
            due_s = SAMPLE_AGAIN * quiet_s
            if seen == job.steps_seen and seen.generation not in job.reported and check is not None:
                log.info("sampled ranks that do not step", quiet_s=round(quiet_s, 1), found=check.text)
                job.sampled(seen, check)

    async def _twice(self, apart: float) -> HangCheck | None:
        """Take two samples and return their result; None: a step was completed meanwhile."""
        job, seen = self._job, self._job.steps_seen
        looks = []
        for wait_s in (apart, 0.0):
            began = time.monotonic()
            looks.append(await look(self._agents, job.spec.name, job.machines, generation=seen.generation))
            await asyncio.sleep(max(wait_s - (time.monotonic() - began), LEAST_S * bool(wait_s)))
            if job.steps_seen != seen:
                return None
        judged = await asyncio.to_thread(judge_looks, looks, job.spec, job.machines, is_hung=True)
        return judged.check
