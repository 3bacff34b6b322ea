"""Release machines: end a job's fork servers and free its shared memory."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say, request_id
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient

PATIENCE_S = 10.0
"""Silent agents are asked again for this long, seconds."""


class ReleaseMachines(Activity[int]):
    """End fork servers and free shared memory; the result is the number of freed bytes.

    A silent machine does not delay the end of a job: :mod:`activities.watching.leftovers` releases it when its agent
    answers again.
    """

    name = "Release machines"

    job: PlacedJob
    dying_s: float | None = None
    """The longest wait for the end of killed ranks, seconds; None: the policy's ``stop.kill_patience_s``."""

    @property
    def _dying_s(self) -> float:
        return self.job.spec.policy.stop.kill_patience_s if self.dying_s is None else self.dying_s

    def line(self) -> str:
        return "fork servers and shared memory"

    def bounds(self) -> Bounds:
        return twice(timedelta(minutes=1, seconds=self._dying_s))

    async def perform(self, tools: Tools, say: Say) -> int:
        from activities.agents.call_all import on_all
        from agent.v1 import agent_pb2 as pb

        request = pb.ReleaseRequest(request_id=request_id(), job=self.job.spec.name, run=self.job.run)

        async def release_machine(_machine: Machine, client: AgentClient) -> int:
            return int((await client.release(request, timeout_s=30)).bytes_freed)

        dying: dict[str, str] = {}
        done, silent = await on_all(
            tools.agents,
            self.job.machines,
            release_machine,
            say=say,
            patience_s=PATIENCE_S,
            dying=dying,
            dying_s=self._dying_s,
        )
        if silent or dying:
            left = {"machines": list(silent), "dying": dying}
            activity.logger.warning("at the release, machines were silent, or killed ranks had not ended", extra=left)
        return sum(done.values())
