"""Calling the agents of many machines at once: silent ones are asked again, refusals are final."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
from everstep.errors import AgentUnreachable, EverstepError, StillDying, UnknownJob
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

T = TypeVar("T")
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 1.0
"""Between two calls of a silent agent, at first and at most, seconds."""
PROBE_S = 0.5
"""An agent that has not answered by then is asked whether it is there, and again so often, seconds."""
PREPARE_S = 120.0
"""A fork server that cannot fork after this long is given up, seconds."""
NAMED = 8
"""Machines that a message names; the others are counted."""


async def on_all(
    agents: AgentClients,
    machines: Sequence[Machine],
    call: Callable[[Machine, AgentClient], Awaitable[T]],
    *,
    patience_s: float,
    say: Say,
    dying: dict[str, str] | None = None,
    dying_s: float = 0.0,
) -> tuple[dict[str, T], list[str]]:
    """Call every machine's agent at once; returns the answers and the machines that stayed silent.

    Args:
        agents: Clients by address.
        machines: Whom to call.
        call: What to ask one machine.
        patience_s: How long a silent agent is asked again, seconds.
        say: Is told who is silent, and who dies, while they are waited for.
        dying: Is filled with the machines whose killed ranks are not gone in the end, and what they say of them.
            None: that is a refusal.
        dying_s: How long such a machine is asked again, seconds.

    Raises:
        ApplicationError: not to be retried; an agent refused.
    """
    began = asyncio.get_running_loop().time()
    deadline = began + patience_s
    waiting: dict[str, None] = {}

    def waited_for() -> str:
        return f"waiting for {listed(waiting)}, whose agent does not answer"

    async def persist(machine: Machine) -> T | None:
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        while True:
            try:
                answer = await call(machine, agents.get(machine.address))
            except AgentUnreachable as error:
                left_s = deadline - asyncio.get_running_loop().time()
                if left_s <= 0:
                    activity.logger.warning("agent is silent", extra={"machine": machine.name, "error": str(error)})
                    return None
                waiting[machine.name] = None
                say(waited_for())
                await asyncio.sleep(min(backoff.next_s(), left_s))
            except EverstepError as error:
                if dying is not None and isinstance(error, StillDying):
                    dying[machine.name] = str(error)
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
                    say(waited_for() if waiting else "")
                return answer

    answers = await gathered(persist(machine) for machine in machines)
    by_name = {machine.name: answer for machine, answer in zip(machines, answers, strict=True)}
    return (
        {name: answer for name, answer in by_name.items() if answer is not None},
        [name for name, answer in by_name.items() if answer is None and name not in (dying or {})],
    )


async def asked_of(client: AgentClient, call: Callable[[], Awaitable[T]], *, probed: bool, patience_s: float) -> T:
    """Call an agent; ``probed``: as long as it is there, see :func:`while_there`."""
    return await (while_there(client, call, patience_s) if probed else call())


async def while_there(client: AgentClient, call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Call an agent as long as it is there: what it was asked may take long, and whether it is there it says at once.

    Args:
        client: Its client.
        call: What to ask.
        patience_s: Where it has not answered either question for so long, it is not there.

    Raises:
        AgentUnreachable: it is not there.
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
    """What starts a job's fork server."""
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
    """Start a job's fork server, where all variables are that the job takes from its machines.

    Raises:
        ConfigError: a variable is missing there.
        AgentError: it refused, or did not answer.
    """
    return await client.prepare(prepare_request(spec, run), timeout_s=PREPARE_S)


async def prepared(client: AgentClient, spec: JobSpec, run: str, call: Callable[[], Awaitable[T]]) -> T:
    """Call an agent that may not know the job: its machine was silent when the job was prepared, or lost its state."""
    try:
        return await call()
    except UnknownJob:
        await prepare(client, spec, run)
        return await call()


def refuse_silent(silent: list[str], machines: Sequence[Machine], *, for_good: bool = False) -> None:
    """Raise when machines stayed silent: to be retried, unless it is ``for_good``.

    Raises:
        ApplicationError: names them and counts the ones that answered.
    """
    if silent:
        raise ApplicationError(
            f"{len(machines) - len(silent)} of {len(machines)} agents answered; {listed(silent)} did not",
            type="AgentUnreachable",
            non_retryable=for_good,
        )
