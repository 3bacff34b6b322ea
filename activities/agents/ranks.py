"""Activities on ranks: prepare, stop, launch, confirm and release, through the node agents.

Every one can run twice, overlap with itself, or lose its worker at any await:
the agents answer a repeated request id with the first reply, fence stopped
generations and never fork a rank twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Protocol

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities import messages
from activities.agents.align import align_ranks
from activities.agents.call_all import asked_of, on_all, prepare, prepared, refuse_silent
from activities.agents.clocks import fit_stop
from activities.agents.confirm import confirm_steps
from activities.agents.convert import backup_peers, checkpoint_options, imports_of, rank_launches, shared_environment
from activities.agents.evidence import evidence_of
from activities.agents.libraries import libraries_of
from activities.agents.ship import Shipment
from activities.heartbeat import Say, heartbeating, now_ns, request_id
from activities.messages import (
    AlignInput,
    AwaitInput,
    ConfirmInput,
    LaunchInput,
    PrepareInput,
    RanksAligned,
    ReleaseInput,
    StopInput,
)
from activities.versions.store import VersionStore
from agent.client import AgentClient, AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.placement import place_backups
from everstep.decisions.pool.ready import differing
from everstep.model.evidence import Evidence
from everstep.model.job import JobSpec
from everstep.model.launch import Confirmation, Launched
from everstep.model.machine import Machine

DYING_NAMED = 16
"""Machines with ranks that do not die that an answer names."""
OTHER_LIBRARIES = "OtherLibraries"
"""Type of the error of a machine that has other libraries than the job's other machines."""


class JobHint(Protocol):
    """What the launching worker tells its own watcher, so that it need not wait for the next listing."""

    def ensure(self, spec: JobSpec, machines: list[Machine], *, generation: int) -> None:
        """Watch a job, of which this generation is about to run on these machines."""


class RankActivities:
    """The activities that talk to the node agents."""

    def __init__(self, agents: AgentClients, watcher: JobHint | None = None, store: VersionStore | None = None) -> None:
        self._agents = agents
        self._watcher = watcher
        self._store = store

    @activity.defn(name=messages.PREPARE)
    async def prepare(self, preparation: PrepareInput) -> float:
        """Start the job's fork server on every machine, and bring its code there meanwhile.

        Returns the slowest start in seconds.
        """
        spec = preparation.spec
        async with heartbeating() as say, Shipment(self._store, spec.code, say) as code:

            async def ready(client: AgentClient) -> pb.PrepareReply:
                reply, _ = await asyncio.gather(prepare(client, spec, preparation.run), code.supply(client))
                return reply

            async def prepare_machine(machine: Machine, client: AgentClient) -> pb.PrepareReply:
                asked = partial(ready, client)
                return await asked_of(client, asked, probed=preparation.probed, patience_s=preparation.patience_s)

            (done, silent), elsewhere = await asyncio.gather(
                on_all(self._agents, preparation.machines, prepare_machine, say=say, patience_s=preparation.patience_s),
                libraries_of(self._agents, spec.name, preparation.like),
            )
        refuse_silent(silent, preparation.machines, for_good=preparation.probed)
        for machine, reply in done.items():
            if said := differing(reply.libraries, [elsewhere]):
                raise ApplicationError(f"{machine} has {said}", type=OTHER_LIBRARIES, non_retryable=True)
        return max((reply.seconds for reply in done.values()), default=0.0)

    @activity.defn(name=messages.STOP)
    async def stop(self, stop: StopInput) -> Evidence:
        """Kill and fence every rank up to a generation; returns what the machines know."""
        request = pb.StopRequest(
            request_id=request_id(),
            job=stop.job,
            generation=stop.generation,
            grace_s=stop.grace_s,
            run=stop.run,
            verify_bytes=int(stop.spec.checkpoint.verify_at_stop_mb * 1e6) if stop.spec else None,
        )

        async def stop_machine(machine: Machine, client: AgentClient) -> pb.StopReply:
            asked_ns = now_ns()
            asked = partial(client.stop, request, timeout_s=stop.grace_s + 20)
            reply = await asked_of(client, asked, probed=stop.probed, patience_s=stop.patience_s)
            fit_stop(reply, asked_ns=asked_ns, heard_ns=now_ns())
            return reply

        dying: dict[str, str] = {}
        async with heartbeating() as say:
            done, silent = await on_all(
                self._agents,
                stop.machines,
                stop_machine,
                say=say,
                patience_s=stop.patience_s,
                dying=dying,
                dying_s=stop.dying_s,
            )
            if dying:
                texts = [f"{machine}: {text}" for machine, text in sorted(dying.items())]
                return Evidence(generation=stop.generation, dying=texts[:DYING_NAMED], unreachable=sorted(silent))
            names = [machine.name for machine in stop.machines]
            homes = stop.spec.assignment(names).homes() if stop.spec else None
            # In a thread: of 16,000 ranks it takes most of a second, and the heartbeats go on meanwhile.
            return await asyncio.to_thread(evidence_of, stop.generation, done, silent, homes)

    @activity.defn(name=messages.LAUNCH)
    async def launch(self, launch: LaunchInput) -> Launched:
        """Start the rendezvous store and then all ranks of a generation, at once."""
        spec = launch.spec
        started_ns = now_ns()
        if self._watcher is not None:
            self._watcher.ensure(spec, launch.machines, generation=launch.generation)
        host_machine = launch.machines[0]
        assignment = spec.assignment(launch.machines)
        position = {machine.name: index for index, machine in enumerate(launch.machines)}
        async with heartbeating() as say, Shipment(self._store, spec.code, say) as code:
            domains = [machine.domain for machine in launch.machines]
            placement = await asyncio.to_thread(place_backups, assignment.topology, domains)
            backed_up = spec.checkpoint.backup
            store = await self._start_store(host_machine, launch, say)

            async def launch_machine(machine: Machine, client: AgentClient) -> pb.LaunchReply:
                index = position[machine.name]
                request = pb.LaunchRequest(
                    request_id=request_id(),
                    job=spec.name,
                    generation=launch.generation,
                    ranks=rank_launches(spec, index),
                    script=spec.script,
                    args=spec.args,
                    cwd=spec.cwd,
                    cwd_by_default=spec.cwd_by_default,
                    env=shared_environment(spec, store.host, store.port, launch.generation),
                    resume_step=launch.resume_step,
                    checkpoint=checkpoint_options(spec, reshard_from=launch.reshard_from),
                    peers=backup_peers(assignment, placement, index) if backed_up else [],
                    run=launch.run,
                    env_from=spec.env_from,
                    env_file=spec.env_file,
                    begins_run=launch.begins_run,
                    code=spec.code,
                    version=spec.version,
                    imports=imports_of(spec),
                )

                def launched() -> Awaitable[pb.LaunchReply]:
                    return code.supplied(client, lambda: client.launch(request, timeout_s=60))

                asked = partial(prepared, client, spec, launch.run, launched)
                return await asked_of(client, asked, probed=launch.probed, patience_s=launch.patience_s)

            done, silent = await on_all(
                self._agents, launch.machines, launch_machine, say=say, patience_s=launch.patience_s
            )
        refuse_silent(silent, launch.machines, for_good=launch.probed)
        forked = [rank.forked_ns for reply in done.values() for rank in reply.ranks]
        return Launched(
            generation=launch.generation,
            resume_step=launch.resume_step,
            started_ns=started_ns,
            forked_ns=max(forked, default=0),
            backups=placement.reason if backed_up else "there are none: backup is false in [checkpoint]",
        )

    async def _start_store(self, machine: Machine, launch: LaunchInput, say: Say) -> pb.StartStoreReply:
        request = pb.StartStoreRequest(
            request_id=request_id(),
            job=launch.spec.name,
            generation=launch.generation,
            world_size=launch.spec.topology().world_size,
            run=launch.run,
            begins_run=launch.begins_run,
            imports=imports_of(launch.spec),
        )

        async def start_store(machine: Machine, client: AgentClient) -> pb.StartStoreReply:
            asked = partial(
                prepared, client, launch.spec, launch.run, lambda: client.start_store(request, timeout_s=60)
            )
            return await asked_of(client, asked, probed=launch.probed, patience_s=launch.patience_s)

        done, silent = await on_all(self._agents, [machine], start_store, say=say, patience_s=launch.patience_s)
        refuse_silent(silent, [machine], for_good=launch.probed)
        return done[machine.name]

    @activity.defn(name=messages.CONFIRM)
    async def confirm(self, launch: ConfirmInput) -> Confirmation:
        """Watch until every rank completed a step, one of them ended, or the time is up."""
        async with heartbeating():
            return await confirm_steps(self._agents, launch)

    @activity.defn(name=messages.ALIGN)
    async def align(self, wait: AlignInput) -> RanksAligned:
        """Have all ranks end the same step and wait there; says why where they do not."""
        async with heartbeating() as say:
            return await align_ranks(self._agents, wait, say)

    @activity.defn(name=messages.AWAIT)
    async def await_machines(self, wait: AwaitInput) -> list[str]:
        """Wait until machines answer; returns those that did not in time."""

        async def describe(_machine: Machine, client: AgentClient) -> str:
            return str((await client.describe()).machine)

        async with heartbeating() as say:
            _, silent = await on_all(self._agents, wait.machines, describe, say=say, patience_s=wait.patience_s)
        return silent

    @activity.defn(name=messages.RELEASE)
    async def release(self, release: ReleaseInput) -> int:
        """Give back fork servers and shared memory; returns the bytes freed.

        A silent machine does not hold up the end of a job: :mod:`activities.watching.leftovers`
        ends what is left there when its agent is back.
        """
        request = pb.ReleaseRequest(request_id=request_id(), job=release.job, run=release.run)

        async def release_machine(machine: Machine, client: AgentClient) -> int:
            return int((await client.release(request, timeout_s=30)).bytes_freed)

        dying: dict[str, str] = {}
        async with heartbeating() as say:
            done, silent = await on_all(
                self._agents,
                release.machines,
                release_machine,
                say=say,
                patience_s=10.0,
                dying=dying,
                dying_s=release.dying_s,
            )
        if silent or dying:
            left = {"machines": silent, "dying": dying}
            activity.logger.warning("machines were silent at release, or have ranks that do not die", extra=left)
        return sum(done.values())
