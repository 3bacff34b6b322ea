"""What the injector takes away for some seconds: a link, the way to the control host, the ledger, all workers."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from controlplane.local import cluster_processes, plan
from controlplane.local.network import Network
from drills.clusters.network import LEDGER, NetworkCluster
from drills.inject.context import DrillContext
from drills.observe.observed import Absorbed
from drills.spec.catalogue import AWAY
from drills.spec.settings import STEPS_AGAIN
from everstep.errors import AgentError, ClusterError

RECOVERED_LIMIT_S = 60.0
"""It has to, within this long beyond the drill's own seconds."""


async def take_away(context: DrillContext) -> None:
    """Do what the drill's fault is, once the job has come to the step.

    Raises:
        ClusterError: the job or the cluster is not as it would have to be.
    """
    await context.reach(context.request.at_step)
    match context.request.base:
        case "link-down":
            with _network(context).link_down(context.target.name):
                context.mark("link-down")
                await asyncio.sleep(context.request.seconds)
        case "cut-link":
            with _network(context).cut_link(*context.request.ends(context.spec)):
                context.mark("cut-link")
                await context.incident_over()
        case "cut-off":
            await _cut_off(context)
        case "kill-postgres":
            async with down(context, [LEDGER]):
                await context.second_fault(exact=False)
                await asyncio.gather(
                    asyncio.sleep(context.request.seconds), _steps_again(context, context.request.at_step)
                )
        case "kill-workers":
            async with down(context, [name for name in context.cluster.processes() if name.startswith("worker-")]):
                await context.second_fault(exact=False)
                await asyncio.sleep(context.request.seconds)


def _network(context: DrillContext) -> Network:
    assert isinstance(context.cluster, NetworkCluster)
    return context.cluster.network


async def _cut_off(context: DrillContext) -> None:
    with _network(context).cut_off(context.target.name):
        began_ns = time.time_ns()
        context.mark("cut-off")
        await asyncio.sleep(context.request.seconds / 2)
        try:
            await context.cluster.control.agents.get(context.target.address).describe(timeout_s=1.0)
        except AgentError:
            await asyncio.sleep(context.request.seconds / 2)
        else:
            raise ClusterError(f"{context.target.name} was cut off from the control host, and answered it")
    context.seen.absorbed = Absorbed(began_ns, await context.agent_back(context.target, 0))


@asynccontextmanager
async def down(context: DrillContext, names: list[str]) -> AsyncIterator[None]:
    """Processes of the cluster are killed, and started again after the block, which ends once they run.

    Raises:
        ClusterError: one of them did not run.
    """
    home, pids = context.cluster.file.home, context.cluster.processes()
    if absent := [name for name in names if name not in pids]:
        raise ClusterError(f"{', '.join(absent)} did not run")
    for name in names:
        plan.hold(home, name)
    began_ns = time.time_ns()
    if context.request.base in AWAY:
        context.mark(context.request.base, victims=[pids[name] for name in names])
    try:
        for name in names:
            if process := cluster_processes.identify(pids[name]):
                cluster_processes.send(process, signal.SIGKILL)
        yield
    finally:
        for name in names:
            plan.let_go(home, name)
    context.seen.absorbed = Absorbed(began_ns, await context.processes_back({name: pids[name] for name in names}))


async def _steps_again(context: DrillContext, before: int) -> None:
    """Until all ranks have completed steps that none had completed when they were struck.

    Raises:
        ClusterError: they do not.
    """
    wanted, limit_s = before + STEPS_AGAIN, context.request.seconds + RECOVERED_LIMIT_S
    try:
        async with asyncio.timeout(limit_s):
            await context.reach(wanted)
    except TimeoutError:
        raise ClusterError(f"step {wanted} was not completed within {limit_s:.0f} s of the fault") from None
