"""Steps that take longer: a machine that has little CPU, a slow link, and work that is uneven by itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from agent.tracer.processes import used
from drills.clusters.network import NetworkCluster
from drills.inject.context import LOOK_S, DrillContext
from drills.inject.cpu_group import little_cpu
from drills.observe.observed import Absorbed
from drills.spec.settings import SLOW_LINK_BYTES
from everstep.errors import ClusterError

MEASURE_S = 3.0
"""For so long it is measured how much CPU time ranks have."""


async def slow_down(context: DrillContext) -> None:
    """Make steps slow once the job has come to the step, until an incident said what it is.

    Raises:
        ClusterError: none does, or the job is not as it would have to be.
        CannotInject: this computer does not let us.
    """
    await context.reach(context.request.at_step)
    began_ns = time.time_ns()
    async with _slowed(context):
        context.mark(context.request.base)
        await context.incident_over()
    if not context.request.replaces:
        context.seen.absorbed = Absorbed(began_ns, time.time_ns())


@contextlib.asynccontextmanager
async def _slowed(context: DrillContext) -> AsyncIterator[None]:
    match context.request.base:
        case "slow-machine":
            pids = [*await _ranks(context), await context.fork_server(context.target)]
            cpus = await _cpus(pids) / context.request.factor
            context.cluster.say(f"{context.target.name}: its ranks have {cpus:.3f} CPUs from now on")
            with little_cpu(pids, cpus):
                yield
        case "slow-link":
            with _slow_link(context):
                yield
        case _:
            yield  # the script does it by itself


@contextlib.contextmanager
def _slow_link(context: DrillContext) -> Iterator[None]:
    assert isinstance(context.cluster, NetworkCluster)
    one, other = context.request.ends(context.spec)
    with context.cluster.network.slow_link(one, other, SLOW_LINK_BYTES / context.request.factor):
        yield


async def _ranks(context: DrillContext) -> list[int]:
    """Pids of the ranks on the struck machine."""
    wanted = context.spec.topology().ranks(context.machines.index(context.target))
    async with context.cluster.control.feed(context.spec.name, context.machines, LOOK_S) as feed:
        async for picture in feed.pictures():
            if all(rank in picture.ranks for rank in wanted):
                return [picture.ranks[rank].pid for rank in wanted]
    raise ClusterError(f"the ranks of {context.target.name} are not there")


async def _cpus(pids: Sequence[int]) -> float:
    """How many CPUs some processes have, on average."""
    before, began = sum(used(pid).cpu_s for pid in pids), time.monotonic()
    await asyncio.sleep(MEASURE_S)
    return (sum(used(pid).cpu_s for pid in pids) - before) / (time.monotonic() - began)
