"""Waits until an inspection detects the device that a drill broke."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from drills.inject.context import LOOK_S, DrillContext
from everstep.errors import AgentError, ClusterError, EverstepError
from everstep.model.machine import Machine

TOLD_LIMIT_S = 20.0
"""After the detection, an incident reports it or the ledger has it within this time, seconds."""
FOUND_LIMIT_S = 60.0
"""An inspection detects the fault within this time, seconds; the longest default period is 30 s."""
OUTAGES = ("nic-down", "nic-flap", "nic-flap-repeated")
"""Reason codes for a link that was down."""


async def await_finding(context: DrillContext) -> None:
    """Wait until the agents of the struck machines have detected the fault, and record the time.

    Raises:
        ClusterError: they do not within the time limit.
    """
    expected = context.request.opening.finding
    assert expected is not None
    await await_reason(context, struck_machines(context), expected.reason)
    context.seen.found_ns = time.time_ns()


async def await_reason(context: DrillContext, machines: Sequence[Machine], reason: str) -> None:
    """Wait until inspections of all these machines report a finding with this reason.

    Raises:
        ClusterError: they do not within the time limit.
    """
    left, deadline = list(machines), time.monotonic() + FOUND_LIMIT_S
    while time.monotonic() < deadline:
        left = [machine for machine in left if not await _finds(context, machine, reason)]
        if not left:
            return
        await asyncio.sleep(LOOK_S)
    names = ", ".join(machine.name for machine in left)
    raise ClusterError(f"the agent of {names} did not find {reason} within {FOUND_LIMIT_S:g} s")


async def _finds(context: DrillContext, machine: Machine, reason: str) -> bool:
    with contextlib.suppress(AgentError):
        reply = await context.cluster.control.agents.get(machine.address).inspect(timeout_s=1.0)
        return any(found.reason == reason for state in reply.inspections for found in state.findings)
    return False


def struck_machines(context: DrillContext) -> list[Machine]:
    """The machines on which a device breaks."""
    return context.machines if context.request.opening.strikes_all else [context.target]


async def await_told(context: DrillContext) -> None:
    """Wait until an incident reports it or the ledger has it; if neither happens, the judge decides."""
    expected = context.request.opening.finding
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
    """The newest generation with ranks on the job's other machines."""
    others = [machine for machine in context.machines if machine is not context.target]
    async with context.cluster.control.feed(context.spec.name, others, LOOK_S) as feed:
        async for picture in feed.pictures():
            if picture.ranks:
                return picture.generation
    return 0


async def await_healed(context: DrillContext) -> None:
    """Wait until inspections no longer report the fault: else the next job on this cluster would get it."""
    reasons = context.request.opening.found_later
    for machine in struck_machines(context) if reasons else ():
        if not await _healed(context, machine, reasons):
            context.cluster.say(f"{', '.join(reasons)} are still found on {machine.name}")


async def _healed(context: DrillContext, machine: Machine, reasons: Sequence[str]) -> bool:
    agent = context.cluster.control.agents.get(machine.address)
    deadline = time.monotonic() + FOUND_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(AgentError):
            for reason in reasons:
                await agent.clear(reason)  # a finding from an event counts for some time
            reply = await agent.inspect(timeout_s=1.0)
            if not any(found.reason in reasons for state in reply.inspections for found in state.findings):
                return True
        await asyncio.sleep(LOOK_S)
    return False


async def machine_events(context: DrillContext) -> list[str]:
    """The ledger's events of the struck machine."""
    ledger = await context.cluster.control.ledger()
    if ledger is None:
        return []
    events = await asyncio.to_thread(ledger.machine_events)
    return [event.text for event in events if event.machine == context.target.name]
