"""Activities on ranks: prepare, stop, launch, confirm and release, through the node agents.

Every one can run twice, overlap with itself, or lose its worker at any await:
the agents answer a repeated request id with the first reply, fence stopped
generations and never fork a rank twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities import messages
from activities.confirm import confirm_steps
from activities.convert import checkpoint_options, evidence_of, import_environment, rank_launches, shared_environment
from activities.heartbeat import heartbeating, now_ns, request_id
from activities.messages import ConfirmInput, LaunchInput, PrepareInput, ReleaseInput, StopInput
from agent.client import AgentClient, AgentPool, UnknownJob
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentUnreachable, EverstepError
from everstep.incident import Confirmation, Evidence, Launched
from everstep.job import JobSpec
from everstep.machine import Machine

T = TypeVar("T")
RETRY_S = 0.1
"""Between two calls of a silent agent, seconds (ours)."""
PREPARE_S = 120.0
"""A fork server that cannot fork after this long is given up, seconds (ours)."""


class JobHint(Protocol):
    """What the launching worker tells its own watcher, so that it need not wait for the next listing."""

    def ensure(self, spec: JobSpec, machines: list[Machine]) -> None:
        """Watch a job."""


class RankActivities:
    """The activities that talk to the node agents."""

    def __init__(self, agents: AgentPool, watcher: JobHint | None = None) -> None:
        self._agents = agents
        self._watcher = watcher

    @activity.defn(name=messages.PREPARE)
    async def prepare(self, given: PrepareInput) -> float:
        """Start the job's fork server on every machine; returns the slowest start in seconds."""
        request = prepare_request(given.spec)

        async def one(client: AgentClient) -> float:
            reply = await client.prepare(request, timeout_s=PREPARE_S)
            return float(reply.seconds)

        async with heartbeating():
            done, silent = await self._on_all(given.machines, one, patience_s=60.0)
        refuse_silent(silent, given.machines)
        return max(done.values(), default=0.0)

    @activity.defn(name=messages.STOP)
    async def stop(self, given: StopInput) -> Evidence:
        """Kill and fence every rank up to a generation; returns what the machines know."""
        request = pb.StopRequest(
            request_id=request_id(), job=given.job, generation=given.generation, grace_s=given.grace_s
        )

        async def one(client: AgentClient) -> pb.StopReply:
            return await client.stop(request, timeout_s=given.grace_s + 20)

        async with heartbeating():
            done, silent = await self._on_all(given.machines, one, patience_s=given.patience_s)
        return evidence_of(given.generation, done, silent)

    @activity.defn(name=messages.LAUNCH)
    async def launch(self, given: LaunchInput) -> Launched:
        """Start the rendezvous store and then all ranks of a generation, at once."""
        spec = given.spec
        started_ns = now_ns()
        if self._watcher is not None:
            self._watcher.ensure(spec, given.machines)
        host_machine = given.machines[0]
        async with heartbeating():
            store = await self._start_store(host_machine, given)

            async def one(client: AgentClient) -> pb.LaunchReply:
                index = next(i for i, m in enumerate(given.machines) if m.address == client.address)
                request = pb.LaunchRequest(
                    request_id=request_id(),
                    job=spec.name,
                    generation=given.generation,
                    ranks=rank_launches(spec, index),
                    script=spec.script,
                    args=spec.args,
                    cwd=spec.cwd,
                    env=shared_environment(spec, store.host, store.port, given.generation),
                    resume_step=given.resume_step,
                    checkpoint=checkpoint_options(spec),
                )
                return await prepared(client, spec, lambda: client.launch(request, timeout_s=60))

            done, silent = await self._on_all(given.machines, one, patience_s=given.patience_s)
        refuse_silent(silent, given.machines)
        forked = [rank.forked_ns for reply in done.values() for rank in reply.ranks]
        return Launched(
            generation=given.generation,
            resume_step=given.resume_step,
            started_ns=started_ns,
            forked_ns=max(forked, default=0),
        )

    async def _start_store(self, machine: Machine, given: LaunchInput) -> pb.StartStoreReply:
        request = pb.StartStoreRequest(
            request_id=request_id(),
            job=given.spec.name,
            generation=given.generation,
            world_size=given.spec.topology().world_size,
        )

        async def one(client: AgentClient) -> pb.StartStoreReply:
            return await prepared(client, given.spec, lambda: client.start_store(request, timeout_s=60))

        done, silent = await self._on_all([machine], one, patience_s=given.patience_s)
        refuse_silent(silent, [machine])
        return done[machine.name]

    @activity.defn(name=messages.CONFIRM)
    async def confirm(self, given: ConfirmInput) -> Confirmation:
        """Watch until every rank completed a step, one of them ended, or the time is up."""
        async with heartbeating():
            return await confirm_steps(self._agents, given)

    @activity.defn(name=messages.RELEASE)
    async def release(self, given: ReleaseInput) -> int:
        """Give back fork servers and shared memory; returns the bytes freed.

        A silent machine does not hold up the end of a job: :mod:`activities.cleanup`
        ends what is left there when its agent is back.
        """
        request = pb.ReleaseRequest(request_id=request_id(), job=given.job)

        async def one(client: AgentClient) -> int:
            return int((await client.release(request, timeout_s=30)).bytes_freed)

        async with heartbeating():
            done, silent = await self._on_all(given.machines, one, patience_s=10.0)
        if silent:
            activity.logger.warning("machines were silent at release", extra={"machines": silent})
        return sum(done.values())

    async def _on_all(
        self, machines: list[Machine], call: Callable[[AgentClient], Awaitable[T]], *, patience_s: float
    ) -> tuple[dict[str, T], list[str]]:
        """Call every machine's agent at once; returns the answers and the machines that stayed silent."""
        deadline = asyncio.get_running_loop().time() + patience_s

        async def persist(machine: Machine) -> T | None:
            while True:
                try:
                    return await call(self._agents.get(machine.address))
                except AgentUnreachable as error:
                    if asyncio.get_running_loop().time() > deadline:
                        activity.logger.warning("agent is silent", extra={"machine": machine.name, "error": str(error)})
                        return None
                    await asyncio.sleep(RETRY_S)
                except EverstepError as error:
                    raise ApplicationError(
                        f"{machine.name}: {error}", type=type(error).__name__, non_retryable=True
                    ) from error

        answers = await asyncio.gather(*(persist(machine) for machine in machines))
        named = {machine.name: answer for machine, answer in zip(machines, answers, strict=True)}
        return (
            {name: answer for name, answer in named.items() if answer is not None},
            [name for name, answer in named.items() if answer is None],
        )


def prepare_request(spec: JobSpec) -> pb.PrepareRequest:
    """What starts a job's fork server."""
    return pb.PrepareRequest(request_id=request_id(), job=spec.name, python=spec.python, env=import_environment(spec))


async def prepared(client: AgentClient, spec: JobSpec, call: Callable[[], Awaitable[T]]) -> T:
    """Call an agent that may not know the job: its machine was silent when the job was prepared, or lost its state."""
    try:
        return await call()
    except UnknownJob:
        await client.prepare(prepare_request(spec), timeout_s=PREPARE_S)
        return await call()


def refuse_silent(silent: list[str], machines: list[Machine]) -> None:
    """Raise, retryable, when machines stayed silent.

    Raises:
        ApplicationError: names them and counts the ones that answered.
    """
    if silent:
        raise ApplicationError(
            f"{len(machines) - len(silent)} of {len(machines)} agents answered; {', '.join(silent)} did not",
            type="AgentUnreachable",
        )
