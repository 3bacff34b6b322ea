"""What is wrong with the machine that is to take the place of a lost one."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from controlplane.local import power
from controlplane.pool import move_machine, pool_state
from drills.inject.context import LOOK_S, DrillContext
from drills.inject.devices import fake_gpus
from drills.inject.found import await_reason
from drills.inject.plan import STANDBY_HOLD
from drills.spec.sure_faults import FAKE_GPUS
from everstep.errors import ClusterError, EverstepError
from everstep.model.pool import PoolMachine, PoolPlace
from everstep.rank import drill_faults as faults

SICK = "gpu-lost"
"""What it has."""
CHOSEN_LIMIT_S = 90.0
"""The incident has got a machine, or waits for one, within this long."""


async def before(context: DrillContext) -> None:
    """Before a machine is lost: the first machine to spare falls sick, or none is to spare any more."""
    match context.request.standby:
        case "sick":
            first = (await _spare(context))[0].machine
            context.seen.standby = first.name
            context.off.callback(fake_gpus, context, first.name, {})
            fake_gpus(context, first.name, FAKE_GPUS[SICK])
            await await_reason(context, [first], SICK)
        case "late":
            for one in await _spare(context):
                await move_machine(context.cluster.control, "evict", one.machine.name, "the drill wants the pool empty")


async def after(context: DrillContext) -> None:
    """Once it is lost: the one that was chosen dies too, or one comes once the job waits for it."""
    match context.request.standby:
        case "dies":
            hold = next(fault for fault in context.planned.workers if fault["id"] == STANDBY_HOLD)
            try:
                await context.until(
                    lambda: faults.fired(context.planned.worker_plan, hold) is not None,
                    CHOSEN_LIMIT_S,
                    "no machine was made ready in the place of the lost one",
                )
                context.seen.standby = await _chosen(context)
                await asyncio.to_thread(_lose, context, context.seen.standby)
            finally:
                await asyncio.to_thread(Path(hold["until"]).touch)
        case "late":
            await _parked(context)
            state = await pool_state(context.cluster.control)
            cordoned = [one for one in state.machines.values() if one.place is PoolPlace.CORDONED] if state else []
            for one in cordoned[:1]:
                await move_machine(context.cluster.control, "release", one.machine.name, "the drill has waited")


async def _spare(context: DrillContext) -> list[PoolMachine]:
    """Machines to spare, in the order in which they are taken.

    Raises:
        ClusterError: there is none.
    """
    state = await pool_state(context.cluster.control)
    known = state.machines.values() if state else []
    spare = [one for one in known if one.place in {PoolPlace.STANDBY, PoolPlace.FREE} and not one.fault]
    if not spare:
        raise ClusterError("no machine is to spare: the pool was to have one")
    return sorted(spare, key=lambda one: (one.place is not PoolPlace.STANDBY, one.machine.name))


async def _chosen(context: DrillContext) -> str:
    """The machine that the pool has given to the job in the place of another one."""
    job, had = context.spec.name, {machine.name for machine in context.machines}
    deadline = time.monotonic() + CHOSEN_LIMIT_S
    while time.monotonic() < deadline:
        state = await pool_state(context.cluster.control)
        for name, one in state.machines.items() if state else ():
            if one.place is PoolPlace.ACTIVE and one.job == job and name not in had:
                return name
        await asyncio.sleep(LOOK_S)
    raise ClusterError("the pool gave the job no machine in the place of the lost one")


def _lose(context: DrillContext, machine: str) -> None:
    context.off.enter_context(power.powered_off(context.cluster.file, [machine]))
    power.empty_memory(context.cluster.file, machine)


async def _parked(context: DrillContext) -> None:
    """Wait until the job waits for a machine.

    Raises:
        ClusterError: it does not.
    """
    deadline = time.monotonic() + CHOSEN_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(EverstepError):  # the control plane may be what was struck
            if (await context.cluster.control.state(context.spec.name)).status == "parked":
                return
        await asyncio.sleep(LOOK_S)
    raise ClusterError(f"the job was not parked within {CHOSEN_LIMIT_S:.0f} s although no machine is to spare")
