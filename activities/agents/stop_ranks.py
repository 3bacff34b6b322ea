"""Ranks of a job are stopped, and their machines answer what they know of them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say, now_ns, request_id
from everstep.model.evidence import Evidence
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient

DYING_NAMED = 16
"""Machines with ranks that do not die that an answer names."""


class StopRanks(Activity[Evidence]):
    """Kill and fence every rank up to a generation; the result is what the machines know."""

    name = "Stop ranks"

    job: PlacedJob
    generation: int
    grace_s: float = 0.0
    patience_s: float = 30.0
    """How long a silent agent is asked again, seconds."""
    probed: bool = False
    """An agent that does not come back from a stop is asked whether it is there at all: where it does not answer that
    for ``patience_s`` either, it is silent."""
    dying_s: float = 15.0
    """Ranks that were killed and are not gone are waited for so long before the answer says so, seconds."""
    why: str = ""
    """For people: why the ranks are stopped."""

    def line(self) -> str:
        return self.why or f"generation {self.generation} on {len(self.job.machines)} machines"

    def bounds(self) -> Bounds:
        return twice(timedelta(minutes=2))

    async def perform(self, tools: Tools, say: Say) -> Evidence:
        from activities.agents.call_all import asked_of, on_all
        from activities.agents.clocks import fit_stop
        from activities.agents.evidence import evidence_of
        from agent.v1 import agent_pb2 as pb

        spec, machines = self.job.spec, self.job.machines
        request = pb.StopRequest(
            request_id=request_id(),
            job=spec.name,
            generation=self.generation,
            grace_s=self.grace_s,
            run=self.job.run,
            verify_bytes=int(spec.checkpoint.verify_at_stop_mb * 1e6),
        )

        async def stop_machine(machine: Machine, client: AgentClient) -> pb.StopReply:
            asked_ns = now_ns()
            asked = partial(client.stop, request, timeout_s=self.grace_s + 20)
            reply = await asked_of(client, asked, probed=self.probed, patience_s=self.patience_s)
            fit_stop(reply, asked_ns=asked_ns, heard_ns=now_ns())
            return reply

        dying: dict[str, str] = {}
        done, silent = await on_all(
            tools.agents,
            machines,
            stop_machine,
            say=say,
            patience_s=self.patience_s,
            dying=dying,
            dying_s=self.dying_s,
        )
        if dying:
            texts = [f"{machine}: {text}" for machine, text in sorted(dying.items())]
            return Evidence(generation=self.generation, dying=texts[:DYING_NAMED], unreachable=sorted(silent))
        homes = spec.assignment([machine.name for machine in machines]).homes()
        # In a thread: of 16,000 ranks it takes most of a second, and the heartbeats continue meanwhile.
        return await asyncio.to_thread(evidence_of, self.generation, done, silent, homes)
