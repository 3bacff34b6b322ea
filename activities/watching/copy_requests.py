"""Requests to all machines of a job about copies of state; no request waits for a silent machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import structlog

from activities.turns import in_turns
from agent.client import AgentClient, AgentClients
from everstep.errors import EverstepError
from everstep.model.machine import Machine

ASK_S = 2.0
"""An agent that does not accept a request about copies of state within this time is left out, seconds."""
Call = Callable[[AgentClient], Awaitable[object]]

log = structlog.get_logger("watcher")


@contextlib.asynccontextmanager
async def copy_requests(agents: AgentClients, machines: Sequence[Machine]) -> AsyncIterator[Callable[[Call], None]]:
    """Yield a function that sends a call to each of the machines, except to those whose last call is still open."""
    asked: dict[str, asyncio.Task[None]] = {}
    rounds: set[asyncio.Task[None]] = set()
    silent: set[str] = set()

    async def ask(machine: Machine, call: Call) -> None:
        try:
            await call(agents.get(machine.address))
            silent.discard(machine.name)
        except EverstepError as error:
            if machine.name not in silent:
                silent.add(machine.name)
                log.warning(
                    "a request about copies of state did not reach a machine", machine=machine.name, error=str(error)
                )

    async def ask_each(call: Call) -> None:
        async for machine in in_turns(machines):
            if machine.name not in asked or asked[machine.name].done():
                asked[machine.name] = asyncio.create_task(ask(machine, call))

    def ask_all(call: Call) -> None:
        task = asyncio.create_task(ask_each(call))
        rounds.add(task)
        task.add_done_callback(rounds.discard)

    try:
        yield ask_all
    finally:
        for task in [*rounds, *asked.values()]:
            task.cancel()
