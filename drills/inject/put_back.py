"""Gives the machines that left a drill's job back to the pool. The drill has repaired them."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from controlplane.machine_pool import move_machine, pool_state
from drills.clusters.local import DrillCluster
from drills.inject.context import POLL_S, DrillContext
from everstep.errors import ClusterError, EverstepError
from everstep.model.pool import PoolMachine, PoolPlace

LIMIT_S = 90.0
"""The pool has cleaned an evicted machine within this time, seconds; it checks every 30 s."""
OUT_OF_USE = frozenset({PoolPlace.QUARANTINED, PoolPlace.CORDONED})
"""Places in the pool whose machines no job may use."""


async def spare_of(cluster: DrillCluster, machines: int) -> int:
    """Return the number of machines that are spare when a job has this many.

    Raises:
        ClusterError: the pool does not answer.
    """
    deadline = time.monotonic() + LIMIT_S
    while (state := await pool_state(cluster.control)) is None:
        if time.monotonic() > deadline:
            raise ClusterError("the machine pool does not answer: see the logs of the workers")
        await asyncio.sleep(POLL_S)
    return max(state.spare - machines, 0)


async def cleaned(context: DrillContext) -> None:
    """Wait until the pool has ended all processes of the job on machines that left it.

    The pool checks these machines every 30 s, and at once after an operator's command, which this function sends.
    """
    deadline = time.monotonic() + LIMIT_S
    while left := [one for one in await out_of_use(context.cluster) if one.uncleaned]:
        if time.monotonic() > deadline:
            return  # the drill reports the processes that are left
        with suppress(EverstepError):
            await move_machine(context.cluster.control, "evict", left[0].machine.name, "the drill waits for it")
        await asyncio.sleep(20 * POLL_S)


async def put_back(context: DrillContext) -> None:
    """Release all machines that are out of use, and wait until jobs may use them."""
    deadline = time.monotonic() + LIMIT_S
    while (out := await out_of_use(context.cluster)) and time.monotonic() < deadline:
        for one in out:
            try:
                await move_machine(context.cluster.control, "release", one.machine.name, "the drill is over")
            except EverstepError as error:
                context.cluster.say(f"{one.machine.name} is not released: {error}")
        await asyncio.sleep(10 * POLL_S)


async def out_of_use(cluster: DrillCluster) -> list[PoolMachine]:
    """Return the machines that no job may use."""
    state = await pool_state(cluster.control)
    return [one for one in state.machines.values() if one.place in OUT_OF_USE] if state else []
