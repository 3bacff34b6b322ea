"""Waiting for an inspection to find what a drill broke."""

from __future__ import annotations

import asyncio
import contextlib
import time

from drills.inject.context import LOOK_S, DrillContext
from drills.spec.findings import expected_of
from everstep.errors import AgentError, ClusterError, EverstepError

TOLD_LIMIT_S = 20.0
"""An incident tells it, or the ledger has it, within this long after that (ours)."""
FOUND_LIMIT_S = 60.0
"""An inspection has found what is broken within this long; the longest default period is 30 s (ours)."""


async def await_finding(context: DrillContext) -> None:
    """Wait until the agent of the struck machine has found it, and note when.

    Raises:
        ClusterError: it does not.
    """
    expected = expected_of(context.request)
    assert expected is not None
    deadline = time.monotonic() + FOUND_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(AgentError):
            reply = await context.cluster.control.agents.get(context.target.address).inspect(timeout_s=1.0)
            if any(found.reason == expected.reason for state in reply.inspections for found in state.findings):
                context.seen.found_ns = time.time_ns()
                return
        await asyncio.sleep(LOOK_S)
    raise ClusterError(f"the agent of {context.target.name} did not find {expected.reason} within {FOUND_LIMIT_S:g} s")


async def await_told(context: DrillContext) -> None:
    """Wait until an incident tells it, or the ledger has it; what is not told is for the judge to see."""
    expected = expected_of(context.request)
    assert expected is not None
    deadline = time.monotonic() + TOLD_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(EverstepError):
            if context.request.replaces:
                if await _generation(context) > 1:  # the job may end now
                    return
            elif expected.opens_incident:
                state = await context.cluster.control.state(context.spec.name)
                if any(incident.resolution for incident in state.incidents):
                    return
            elif expected.reason in " ".join(await machine_events(context)):
                return
        await asyncio.sleep(LOOK_S)


async def _generation(context: DrillContext) -> int:
    """The newest one that the job's other machines have ranks of."""
    others = [machine for machine in context.machines if machine is not context.target]
    async with context.cluster.control.feed(context.spec.name, others, LOOK_S) as feed:
        async for picture in feed.pictures():
            if picture.ranks:
                return picture.generation
    return 0


async def await_healed(context: DrillContext) -> None:
    """Wait until the machine's inspections find it no more: it would be told to the next job on this cluster."""
    expected = expected_of(context.request)
    if expected is None:
        return
    agent = context.cluster.control.agents.get(context.target.address)
    deadline = time.monotonic() + FOUND_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(AgentError):
            await agent.clear(expected.reason)  # what an event told counts for some time
            reply = await agent.inspect(timeout_s=1.0)
            if not any(found.reason == expected.reason for state in reply.inspections for found in state.findings):
                return
        await asyncio.sleep(LOOK_S)
    context.cluster.say(f"{expected.reason} is still found on {context.target.name}")


async def machine_events(context: DrillContext) -> list[str]:
    """What the ledger has of the struck machine."""
    ledger = await context.cluster.control.ledger()
    if ledger is None:
        return []
    events = await asyncio.to_thread(ledger.machine_events)
    return [event.text for event in events if event.machine == context.target.name]
