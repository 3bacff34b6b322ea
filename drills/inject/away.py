"""What the injector takes away for some seconds: a link, the way to the control host, the ledger, all workers."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from controlplane.local import plan, procfs
from controlplane.local.network import Network
from drills.clusters.network import LEDGER, NetworkCluster
from drills.inject.context import DrillContext
from drills.observe.observed import Absorbed
from drills.spec.settings import STEPS_AGAIN
from everstep.errors import AgentError, ClusterError

RECOVERED_LIMIT_S = 60.0
"""It has to, within this long beyond the drill's own seconds (ours)."""


async def take_away(scene: DrillContext) -> None:
    """Do what the drill's fault is, once the job has come to the step.

    Raises:
        ClusterError: the job or the cluster is not as it would have to be.
    """
    await scene.reach(scene.request.at_step)
    match scene.request.base:
        case "link-down":
            with _network(scene).link_down(scene.struck.name):
                scene.mark("link-down")
                await asyncio.sleep(scene.request.seconds)
        case "cut-off":
            await _cut_off(scene)
        case "kill-postgres":
            async with _down(scene, [LEDGER]):
                await scene.strike(exact=False)
                await asyncio.gather(asyncio.sleep(scene.request.seconds), _steps_again(scene, scene.request.at_step))
        case "kill-workers":
            async with _down(scene, [name for name in scene.cluster.processes() if name.startswith("worker-")]):
                await scene.strike(exact=False)
                await asyncio.sleep(scene.request.seconds)


def _network(scene: DrillContext) -> Network:
    assert isinstance(scene.cluster, NetworkCluster)
    return scene.cluster.network


async def _cut_off(scene: DrillContext) -> None:
    with _network(scene).cut_off(scene.struck.name):
        began_ns = time.time_ns()
        scene.mark("cut-off")
        await asyncio.sleep(scene.request.seconds / 2)
        try:
            await scene.cluster.control.agents.get(scene.struck.address).describe(timeout_s=1.0)
        except AgentError:
            await asyncio.sleep(scene.request.seconds / 2)
        else:
            raise ClusterError(f"{scene.struck.name} was cut off from the control host, and answered it")
    scene.seen.absorbed = Absorbed(began_ns, await scene.agent_back(scene.struck, 0))


@asynccontextmanager
async def _down(scene: DrillContext, names: list[str]) -> AsyncIterator[None]:
    """Processes of the cluster are killed, and started again after the block, which ends once they run."""
    home, pids = scene.cluster.file.home, scene.cluster.processes()
    if absent := [name for name in names if name not in pids]:
        raise ClusterError(f"{', '.join(absent)} did not run")
    for name in names:
        plan.hold(home, name)
    began_ns = time.time_ns()
    scene.mark(scene.request.base, victims=[pids[name] for name in names])
    try:
        for name in names:
            if process := procfs.identify(pids[name]):
                procfs.send(process, signal.SIGKILL)
        yield
    finally:
        for name in names:
            plan.let_go(home, name)
    scene.seen.absorbed = Absorbed(began_ns, await scene.processes_back({name: pids[name] for name in names}))


async def _steps_again(scene: DrillContext, before: int) -> None:
    """Until all ranks have completed steps that none had completed when they were struck.

    Raises:
        ClusterError: they do not.
    """
    wanted, limit_s = before + STEPS_AGAIN, scene.request.seconds + RECOVERED_LIMIT_S
    try:
        async with asyncio.timeout(limit_s):
            await scene.reach(wanted)
    except TimeoutError:
        raise ClusterError(f"step {wanted} was not completed within {limit_s:.0f} s of the fault") from None
