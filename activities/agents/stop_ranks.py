"""Stop ranks: kill the ranks of a job and collect what their machines know."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say, now_ns, request_id
from activities.turns import gathered
from everstep.decisions.clocks import shift_ns
from everstep.errors import AgentRefuses, EverstepError
from everstep.model.evidence import Evidence
from everstep.model.finding import MachineFinding
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient, AgentClients
    from agent.v1 import agent_pb2 as pb

INSPECT_S = 3.0
"""The longest wait for the inspections of a machine whose ranks are not gone, seconds."""


class StopRanks(Activity[Evidence]):
    """Kill all ranks of this generation and earlier ones, and fence these generations; the result is the machines'
    evidence."""

    name = "Stop ranks"

    job: PlacedJob
    generation: int
    grace_s: float = 0.0
    patience_s: float = 30.0
    """Silent agents are asked again for this long, seconds."""
    probed: bool = False
    """Slow agents are probed: an agent counts as silent only if it answers neither the stop nor a probe for
    ``patience_s``."""
    dying_s: float = 15.0
    """Killed ranks that still exist after this time are reported in the result, seconds."""
    why: str = ""
    """The reason for the stop, for the timeline."""

    def line(self) -> str:
        return self.why or f"generation {self.generation} on {len(self.job.machines)} machines"

    def bounds(self) -> Bounds:
        return twice(timedelta(minutes=2))

    async def perform(self, tools: Tools, say: Say) -> Evidence:
        from activities.agents.call_all import call_agent, on_all
        from activities.agents.evidence import evidence_of
        from activities.agents.other_machines import another_answers
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
            reply = await call_agent(client, asked, probed=self.probed, patience_s=self.patience_s)
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
        found = await _inspected(tools.agents, [machine for machine in machines if machine.name in dying])
        assignment = spec.assignment([machine.name for machine in machines])
        # This runs in a thread: with thousands of machines it takes most of a second, and heartbeats must continue.
        evidence = await asyncio.to_thread(evidence_of, self.generation, done, silent, assignment, found)
        cut_off = len(silent) == len(machines) and not await another_answers(tools.agents, tools.cluster, machines)
        refusing = {name: str(error) for name, error in silent.items() if isinstance(error, AgentRefuses)}
        return evidence.model_copy(update={"refusing": refusing, "cut_off": cut_off, "dying": dying})


async def _inspected(agents: AgentClients, machines: Sequence[Machine]) -> list[MachineFinding]:
    """Return the findings of machines whose ranks are not gone; a machine that does not answer has none."""
    from agent.reporting.observations import finding_of

    async def inspect(machine: Machine) -> list[MachineFinding]:
        try:
            reply = await agents.get(machine.address).inspect(timeout_s=INSPECT_S)
        except EverstepError:
            return []
        found = [finding for state in reply.inspections for finding in state.findings]
        return [MachineFinding(machine=machine.name, finding=finding_of(one)) for one in found]

    return [found for each in await gathered(map(inspect, machines)) for found in each]


def fit_stop(reply: pb.StopReply, *, asked_ns: int, heard_ns: int) -> None:
    """Correct the times at which ranks ended, so that they can be compared across machines."""
    shift = shift_ns(reply.now_ns, asked_ns=asked_ns, heard_ns=heard_ns)
    for rank in reply.ranks if shift else ():
        if rank.exit.time_ns:
            rank.exit.time_ns += shift
