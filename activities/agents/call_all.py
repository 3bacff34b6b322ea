"""Calls the agents of many machines at once. Silent agents are asked again; a refusal is final."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.agents.convert import import_environment
from activities.heartbeat import Say, request_id
from activities.turns import gathered
from agent.client import AgentClient, AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.base.backoff import Backoff
from everstep.base.text import listed
from everstep.errors import AgentRefuses, AgentUnreachable, EverstepError, StillDying, UnknownJob
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

T = TypeVar("T")
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 1.0
"""The first and the longest wait before a silent agent is called again, seconds."""
PROBE_S = 0.5
"""An agent that has not answered within this time gets a short request that shows whether it is alive; seconds."""
PREPARE_S = 120.0
"""A fork server that cannot fork within this time is given up, seconds."""
NAMED = 8
"""The largest number of machines that a message names; the rest is counted."""


async def on_all(
    agents: AgentClients,
    machines: Sequence[Machine],
    call: Callable[[Machine, AgentClient], Awaitable[T]],
    *,
    patience_s: float,
    say: Say,
    dying: dict[str, str] | None = None,
    dying_s: float = 0.0,
) -> tuple[dict[str, T], dict[str, AgentUnreachable]]:
    """Call the agents of all machines at once; returns the answers, and the machines that stayed silent with the last
    error of each.

    Args:
        agents: Clients by address.
        machines: The machines to call.
        call: The request to one machine.
        patience_s: Silent agents are asked again for this long, seconds.
        say: Shows during the wait which machines are silent, and which still have killed ranks.
        dying: Machine → its answer; it is filled with the machines whose killed ranks still exist at the end.
            None: such an answer counts as a refusal.
        dying_s: A machine whose killed ranks still exist is asked again for this long, seconds.

    Raises:
        ApplicationError: an agent refused; it is not retried.
    """
    began = asyncio.get_running_loop().time()
    deadline = began + patience_s
    waiting: dict[str, AgentUnreachable] = {}

    async def persist(machine: Machine) -> T | None:
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        while True:
            try:
                answer = await call(machine, agents.get(machine.address))
            except AgentUnreachable as error:
                if dying is not None:  # it is not known any more whether its ranks exist
                    dying.pop(machine.name, None)
                waiting[machine.name] = error
                left_s = deadline - asyncio.get_running_loop().time()
                if left_s <= 0:
                    activity.logger.warning("agent is silent", extra={"machine": machine.name, "error": str(error)})
                    return None
                say(waiting_text(waiting))
                await asyncio.sleep(min(backoff.next_s(), left_s))
            except EverstepError as error:
                if dying is not None and isinstance(error, StillDying):
                    dying[machine.name] = str(error)
                    waiting.pop(machine.name, None)
                    say(f"{machine.name}: {error}")
                    if asyncio.get_running_loop().time() > began + dying_s:
                        return None
                    await asyncio.sleep(backoff.next_s())
                    continue
                raise ApplicationError(
                    f"{machine.name}: {error}", type=type(error).__name__, non_retryable=True
                ) from error
            else:
                if dying is not None:
                    dying.pop(machine.name, None)
                if machine.name in waiting:
                    del waiting[machine.name]
                    say(waiting_text(waiting) if waiting else "")
                return answer

    answers = await gathered(persist(machine) for machine in machines)
    by_name = {machine.name: answer for machine, answer in zip(machines, answers, strict=True)}
    return (
        {name: answer for name, answer in by_name.items() if answer is not None},
        {name: waiting[name] for name, answer in by_name.items() if answer is None and name not in (dying or {})},
    )


def waiting_text(silent: Mapping[str, AgentUnreachable]) -> str:
    """Return the text that says which machines are waited for, and why."""
    refusing = [str(error) for error in silent.values() if isinstance(error, AgentRefuses)]
    return f"waiting for {listed(silent)}: {refusing[0] if refusing else 'its agent does not answer'}"


async def call_agent(client: AgentClient, call: Callable[[], Awaitable[T]], *, probed: bool, patience_s: float) -> T:
    """Call an agent; with ``probed``, wait for the answer as long as the agent is alive (:func:`call_while_alive`)."""
    return await (call_while_alive(client, call, patience_s) if probed else call())


async def call_while_alive(client: AgentClient, call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Call an agent and wait as long as it is alive: the call may take long, but an agent answers a probe at once.

    Args:
        client: The client of the agent.
        call: The request.
        patience_s: An agent that answers neither the call nor a probe for this long is unreachable, seconds.

    Raises:
        AgentUnreachable: the agent does not answer.
    """
    clock = asyncio.get_running_loop()
    calling = asyncio.ensure_future(call())
    heard_s = clock.time()
    try:
        pause_s = PROBE_S
        silent: AgentUnreachable | None = None
        while not (await asyncio.wait([calling], timeout=pause_s))[0]:
            if silent is not None and clock.time() - heard_s >= patience_s:
                raise silent
            try:
                await client.describe(timeout_s=max(patience_s / 2, PROBE_S))
                heard_s, pause_s, silent = clock.time(), PROBE_S, None
            except AgentUnreachable as error:
                silent = error
                pause_s = min(PROBE_S, max(heard_s + patience_s - clock.time(), 0.0))
        return calling.result()
    finally:
        calling.cancel()


def prepare_request(spec: JobSpec, run: str) -> pb.PrepareRequest:
    """Return the request that starts a job's fork server."""
    return pb.PrepareRequest(
        request_id=request_id(),
        job=spec.name,
        python=spec.python,
        env=import_environment(spec),
        run=run,
        env_from=spec.env_from,
        env_file=spec.env_file,
    )


async def prepare(client: AgentClient, spec: JobSpec, run: str) -> pb.PrepareReply:
    """Start a job's fork server on a machine, which must have all environment variables that the job takes from it.

    Raises:
        ConfigError: a variable is missing on the machine.
        AgentError: the agent refused, or did not answer.
    """
    return await client.prepare(prepare_request(spec, run), timeout_s=PREPARE_S)


async def prepared(client: AgentClient, spec: JobSpec, run: str, call: Callable[[], Awaitable[T]]) -> T:
    """Call an agent. If it does not know the job, prepare the job there and call it again.

    An agent does not know the job if it was silent at the job's preparation, or has lost its state.
    """
    try:
        return await call()
    except UnknownJob:
        await prepare(client, spec, run)
        return await call()


def refuse_silent(
    silent: Mapping[str, AgentUnreachable], machines: Sequence[Machine], *, for_good: bool = False
) -> None:
    """Raise an error if machines stayed silent. Temporal then retries the activity, except with ``for_good``.

    Raises:
        ApplicationError: the message names the silent machines and counts those that answered.
    """
    if silent:
        refusing = [f": {error}" for error in silent.values() if isinstance(error, AgentRefuses)]
        raise ApplicationError(
            f"{len(machines) - len(silent)} of {len(machines)} agents answered; {listed(silent)} did not"
            f"{refusing[0] if refusing else ''}",
            type="AgentUnreachable",
            non_retryable=for_good,
        )
