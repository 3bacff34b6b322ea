"""Find checkpoints: ask machines for the copies of training state in memory, on disks and on remote storage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say
from everstep.model.evidence import Evidence
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient
    from agent.v1 import agent_pb2 as pb

MARGIN_S = 15.0
"""The time that an agent's answer may take beyond the time limit of its storage, seconds."""


class FindCheckpoints(Activity[Evidence]):
    """Ask all machines for all copies of training state."""

    name = "Find checkpoints"

    job: PlacedJob
    at: int | None = None
    """The step that is needed, for the timeline; None: any step."""
    patience_s: float = 10.0

    def line(self) -> str:
        return "on disks and remote storage" if self.at is None else f"of step {self.at}"

    def bounds(self) -> Bounds:
        return twice(timedelta(seconds=120 + self.job.spec.policy.storage.answer_s))

    async def perform(self, tools: Tools, say: Say) -> Evidence:
        from activities.agents.call_all import on_all
        from agent.v1 import agent_pb2 as pb

        spec = self.job.spec
        answer_s = spec.policy.storage.answer_s
        request = pb.CheckpointsRequest(
            job=spec.name,
            disk_path=spec.checkpoint.disk_path,
            remote_url=spec.checkpoint.remote_url,
            patience_s=answer_s,
        )

        async def list_copies(_machine: Machine, client: AgentClient) -> pb.CheckpointsReply:
            return await client.checkpoints(request, timeout_s=answer_s + MARGIN_S)

        done, silent = await on_all(tools.agents, self.job.machines, list_copies, say=say, patience_s=self.patience_s)
        return await asyncio.to_thread(self._evidence, done, silent)

    def _evidence(self, done: Mapping[str, pb.CheckpointsReply], silent: Iterable[str]) -> Evidence:
        from activities.agents.evidence import unlisted_of
        from activities.agents.held_copies import held_of

        spec, names = self.job.spec, [machine.name for machine in self.job.machines]
        checkpoints = {machine: reply.checkpoints for machine, reply in done.items()}
        held, shared = held_of(checkpoints, spec.assignment(names))
        return Evidence(
            generation=0,
            machines=names,
            held=held,
            unreachable=sorted(silent),
            disk_shared=shared,
            unlisted=unlisted_of(checkpoints, silent, remote_asked=bool(spec.checkpoint.remote_url)),
        )
