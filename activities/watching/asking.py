"""Asks all machines of a job for something about copies of state, without waiting for a silent one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from activities.turns import in_turns
from activities.watching.job_view import JobView
from agent.client import AgentClient, AgentPool
from everstep.errors import EverstepError
from everstep.model.machine import Machine

log = structlog.get_logger("watcher")

Call = Callable[[AgentClient], Awaitable[object]]


@contextlib.asynccontextmanager
async def asking(agents: AgentPool, job: JobView) -> AsyncIterator[Callable[[Call], None]]:
    """Gives a function that sends a call to each machine of a job, unless its last call has not ended yet."""
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
                log.warning("a machine was not asked for copies of state", machine=machine.name, error=str(error))

    async def ask_each(call: Call) -> None:
        async for machine in in_turns(job.machines):
            if machine.name not in asked or asked[machine.name].done():
                asked[machine.name] = asyncio.create_task(ask(machine, call))

    def ask_all(call: Call) -> None:
        going = asyncio.create_task(ask_each(call))
        rounds.add(going)
        going.add_done_callback(rounds.discard)

    try:
        yield ask_all
    finally:
        for task in [*rounds, *asked.values()]:
            task.cancel()
