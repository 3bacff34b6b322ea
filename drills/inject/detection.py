"""Waits until inspections detect the device that a drill broke, and until the detection is reported."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from drills.inject.context import POLL_S, DrillContext
from everstep.errors import AgentError, ClusterError, EverstepError
from everstep.model.machine import Machine

REPORT_LIMIT_S = 20.0
"""Within this time after the detection, an incident reports the finding or the ledger has it, seconds."""
DETECTION_LIMIT_S = 60.0
"""An inspection detects the fault within this time, seconds; the longest default period of an inspection is 30 s."""
LINK_REASONS = ("nic-down", "nic-flap", "nic-flap-repeated")
"""Reason codes of findings about a link that was down."""


async def await_finding(context: DrillContext) -> None:
    """Wait until the agents of the struck machines have detected the fault, and record the time.

    Raises:
        ClusterError: an agent does not detect it within the time limit.
    """
    expected = context.request.opening.finding
    assert expected is not None
    await await_reason(context, struck_machines(context), expected.reason)
    context.seen.detected_ns = time.time_ns()


async def await_reason(context: DrillContext, machines: Sequence[Machine], reason: str) -> None:
    """Wait until inspections of all these machines report a finding with this reason code.

    Raises:
        ClusterError: an inspection does not report it within the time limit.
    """
    left, deadline = list(machines), time.monotonic() + DETECTION_LIMIT_S
    while time.monotonic() < deadline:
        left = [machine for machine in left if not await _has_finding(context, machine, (reason,))]
        if not left:
            return
        await asyncio.sleep(POLL_S)
    names = ", ".join(machine.name for machine in left)
    raise ClusterError(f"the agents of {names} did not report {reason} within {DETECTION_LIMIT_S:g} s")


async def _has_finding(context: DrillContext, machine: Machine, reasons: Sequence[str]) -> bool | None:
    """Return whether a machine has a finding with one of these reasons; None: its agent does not answer."""
    with contextlib.suppress(AgentError):
        reply = await context.cluster.control.agents.get(machine.address).inspect(timeout_s=1.0)
        return any(finding.reason in reasons for state in reply.inspections for finding in state.findings)
    return None


def struck_machines(context: DrillContext) -> list[Machine]:
    """Return the machines on which a device breaks."""
    return context.machines if context.request.opening.strikes_all else [context.target]


async def await_report(context: DrillContext) -> None:
    """Wait until an incident reports the finding, or the ledger has it.

    After the time limit it just returns, since the judge notices a missing report.
    """
    expected = context.request.opening.finding
    assert expected is not None
    deadline = time.monotonic() + REPORT_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(EverstepError):
            if context.request.replaces:
                if await _generation(context) > 1:  # the machine was replaced
                    return
            elif expected.opens_incident:
                state = await context.cluster.control.state(context.spec.name)
                if any(incident.resolution for incident in state.incidents):
                    return
            elif expected.reason in " ".join(await machine_events(context)):
                return
        await asyncio.sleep(POLL_S)


async def _generation(context: DrillContext) -> int:
    """Return the generation of the ranks on the job's other machines."""
    others = [machine for machine in context.machines if machine is not context.target]
    async with context.cluster.control.feed(context.spec.name, others, POLL_S) as feed:
        async for picture in feed.pictures():
            if picture.ranks:
                return picture.generation
    return 0


async def await_healed(context: DrillContext) -> None:
    """Wait until inspections no longer report the fault, which would strike the next job on this cluster too."""
    reasons = context.request.opening.lingering_reasons
    for machine in struck_machines(context) if reasons else ():
        if not await _healed(context, machine, reasons):
            context.cluster.say(f"inspections of {machine.name} still report one of {', '.join(reasons)}")


async def _healed(context: DrillContext, machine: Machine, reasons: Sequence[str]) -> bool:
    agent = context.cluster.control.agents.get(machine.address)
    deadline = time.monotonic() + DETECTION_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(AgentError):
            for reason in reasons:
                await agent.clear(reason)  # a finding from an event would otherwise stay active for some time
            if await _has_finding(context, machine, reasons) is False:
                return True
        await asyncio.sleep(POLL_S)
    return False


async def machine_events(context: DrillContext) -> list[str]:
    """Return the texts of the ledger's events of the struck machine."""
    ledger = await context.cluster.control.ledger()
    if ledger is None:
        return []
    events = await asyncio.to_thread(ledger.machine_events)
    return [event.text for event in events if event.machine == context.target.name]
