"""Launch ranks: start the rendezvous store, then all ranks of a generation at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say, now_ns, request_id
from everstep.base.addresses import Ports
from everstep.decisions.keep.placement import place_backups
from everstep.model.job import PlacedJob
from everstep.model.launch import Launched
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient
    from agent.v1 import agent_pb2 as pb


class LaunchRanks(Activity[Launched]):
    """Start the rendezvous store and then all ranks of a generation."""

    name = "Launch ranks"

    job: PlacedJob
    generation: int
    resume_step: int
    save_every: int = 0
    """After how many steps the generation before saved; 0: not known."""
    reason: str = ""
    patience_s: float = 30.0
    probed: bool = False
    """Slow agents are probed, see :class:`~activities.agents.stop_ranks.StopRanks`. The activity then fails for a
    silent machine, and is not retried."""
    reshard_from: str = ""
    """The folder of a disk checkpoint that the ranks start from, with any parallel sizes; empty: there is none."""
    begins_run: bool = False
    """The generation is the first of its run. Its number may be higher than 1, because the numbers continue from run to
    run."""
    origin: str = ""
    """A text about where the ranks resume, for the timeline."""

    def line(self) -> str:
        return f"generation {self.generation}, {self.job.spec.topology().world_size} ranks, {self.origin}"

    def bounds(self) -> Bounds:
        return twice(timedelta(minutes=3))

    async def perform(self, tools: Tools, say: Say) -> Launched:
        from activities.agents.call_all import call_agent, on_all, prepared, refuse_silent
        from activities.agents.convert import (
            backup_peers,
            checkpoint_options,
            program_of,
            rank_launches,
            shared_environment,
        )
        from activities.agents.ship import Shipment
        from agent.v1 import agent_pb2 as pb

        spec, machines, run = self.job.spec, self.job.machines, self.job.run
        started_ns = now_ns()
        if tools.watcher is not None:
            tools.watcher.ensure(spec, machines, generation=self.generation)
        assignment = spec.assignment(machines)
        position = {machine.name: index for index, machine in enumerate(machines)}
        async with Shipment(tools.versions, spec.code, say) as code:
            domains = [machine.domain for machine in machines]
            placement = await asyncio.to_thread(place_backups, assignment.topology, domains)
            backed_up = spec.checkpoint.backup
            store = await self._start_store(tools, say)
            program = program_of(spec, shared_environment(spec, store.host, store.port, self.generation))

            async def launch_machine(machine: Machine, client: AgentClient) -> pb.LaunchReply:
                index = position[machine.name]
                request = pb.LaunchRequest(
                    request_id=request_id(),
                    job=spec.name,
                    generation=self.generation,
                    ranks=rank_launches(spec, index),
                    program=program,
                    resume_step=self.resume_step,
                    checkpoint=checkpoint_options(spec, reshard_from=self.reshard_from),
                    peers=backup_peers(assignment, placement, index) if backed_up else [],
                    run=run,
                    begins_run=self.begins_run,
                    version=spec.version,
                    save_every=spec.checkpoint.first_distance(self.save_every),
                )

                def launched() -> Awaitable[pb.LaunchReply]:
                    return code.supplied(client, lambda: client.launch(request, timeout_s=60))

                asked = partial(prepared, client, spec, run, launched)
                return await call_agent(client, asked, probed=self.probed, patience_s=self.patience_s)

            done, silent = await on_all(tools.agents, machines, launch_machine, say=say, patience_s=self.patience_s)
        refuse_silent(silent, machines, for_good=self.probed)
        forked = [rank.forked_ns for reply in done.values() for rank in reply.ranks]
        return Launched(
            generation=self.generation,
            resume_step=self.resume_step,
            started_ns=started_ns,
            forked_ns=max(forked, default=0),
            backups=placement.reason if backed_up else "there are none: backup is false in [checkpoint]",
        )

    async def _start_store(self, tools: Tools, say: Say) -> pb.StartStoreReply:
        from activities.agents.call_all import call_agent, on_all, prepared, refuse_silent
        from activities.agents.convert import imports_of
        from agent.v1 import agent_pb2 as pb

        spec, run, host = self.job.spec, self.job.run, self.job.machines[0]
        ports = Ports.parse(spec.store_ports or "0")
        request = pb.StartStoreRequest(
            request_id=request_id(),
            job=spec.name,
            generation=self.generation,
            run=run,
            begins_run=self.begins_run,
            imports=imports_of(spec),
            first_port=ports.first,
            last_port=ports.last,
        )

        async def start_store(_machine: Machine, client: AgentClient) -> pb.StartStoreReply:
            asked = partial(prepared, client, spec, run, lambda: client.start_store(request, timeout_s=60))
            return await call_agent(client, asked, probed=self.probed, patience_s=self.patience_s)

        done, silent = await on_all(tools.agents, [host], start_store, say=say, patience_s=self.patience_s)
        refuse_silent(silent, [host], for_good=self.probed)
        return done[host.name]
