"""What the injector does from outside: to agents, fork servers and machines, and to copies of state."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from controlplane.local import cluster_processes, plan
from drills.inject import damage, standby
from drills.inject.away import take_away
from drills.inject.context import LOOK_S, DrillContext
from drills.inject.devices import break_device
from drills.inject.full_disks import fill_disk, fill_memory
from drills.inject.slowness import slow_down
from drills.inject.updates import ask_for_update
from drills.observe.observed import Absorbed
from drills.observe.processes import await_rank_of
from drills.spec.catalogue import AWAY, DEVICES, SLOWED, UPDATES
from drills.spec.loss import hung_machines
from drills.spec.request import DrillRequest
from drills.spec.settings import SILENT_S
from everstep.errors import CannotInject, ClusterError
from everstep.rank import drill_faults as faults
from everstep.system.procfs import children

LAUNCH_LIMIT_S = 60.0
TRANSFER_LIMIT_S = 60.0
"""A backup is on its way within this long."""
REACH_LIMIT_S = 300.0
"""A job has started and come to the step within this long."""


async def inject(context: DrillContext) -> None:
    """Do what the drill's fault is, once the job has come to the step.

    Raises:
        ClusterError: the job or the cluster is not as it would have to be.
        CannotInject: it is a fault of another kind.
    """
    try:
        await _action(context.request)(context)
        if context.request.struck_again:
            await context.settled(await context.held_up())
            await context.second_fault(exact=True)
    finally:
        context.planned.let_go()


Action = Callable[[DrillContext], Awaitable[None]]


def _action(request: DrillRequest) -> Action:
    """What is done for a drill's fault.

    Raises:
        CannotInject: it is a fault of another kind.
    """
    if request.base in AWAY:
        return take_away
    if request.during == "launch":
        return _kill_in_launch
    actions: dict[str, Action] = {
        "kill-machine": _lose,
        "kill-group": _lose,
        "flip-bit": _damage,
        "truncate-file": _damage,
        "shm-full": fill_memory,
        "disk-full": fill_disk,
        "hang-peer": _hang,
        "hang-agents": _hang_several,
        "kill-peer": _kill_in_transfer,
        "kill-forkserver": _kill_fork_server,
        **dict.fromkeys(DEVICES, break_device),
        **dict.fromkeys(SLOWED, slow_down),
        **dict.fromkeys(UPDATES, ask_for_update),
        "kill-agent": _kill_agent,
    }
    if request.base not in actions:
        raise CannotInject(f"{request.base}: nothing here injects it")
    return actions[request.base]


async def _lose(context: DrillContext) -> None:
    """Lose machines with all that they had."""
    await context.reach(context.request.at_step)
    await standby.before(context)
    await context.second_fault(exact=False)
    await standby.after(context)


async def _kill_agent(context: DrillContext) -> None:
    """Kill the agent of the struck machine, and wait until it is back."""
    await context.reach(context.request.at_step)
    before, name = context.agent(context.target), f"agent-{context.target.name}"
    with ExitStack() as held:
        if context.request.gone:
            plan.hold(context.cluster.home, name)
            held.callback(plan.let_go, context.cluster.home, name)
        killed_ns = _kill(context, before)
        if context.request.gone:
            await asyncio.sleep(SILENT_S)
    context.seen.absorbed = Absorbed(killed_ns, await context.agent_back(context.target, before))


async def _kill_fork_server(context: DrillContext) -> None:
    await context.reach(context.request.at_step)
    before = await context.fork_server(context.target)
    if not before:
        raise ClusterError(f"the job has no fork server on {context.target.name}")
    killed_ns = _kill(context, before)
    context.seen.absorbed = Absorbed(killed_ns, await context.fork_server_back(context.target, before))


async def _kill_in_launch(context: DrillContext) -> None:
    """Kill the agent as soon as its fork server forked the first rank of the next generation."""
    await context.reach(1, [context.target])
    fork_server = await context.fork_server(context.target)
    known = children(fork_server) or set()
    while faults.fired(context.planned.plan, context.planned.ranks[0]) is None:  # noqa: ASYNC110 - a rank says so, by a file
        await asyncio.sleep(LOOK_S)
    before = context.agent(context.target)
    if await asyncio.to_thread(await_rank_of, fork_server, known, LAUNCH_LIMIT_S) is None:
        raise ClusterError(f"no rank was launched on {context.target.name} within {LAUNCH_LIMIT_S:.0f} s")
    killed_ns = _kill(context, before)
    context.seen.absorbed = Absorbed(killed_ns, await context.agent_back(context.target, before))


async def _kill_in_transfer(context: DrillContext) -> None:
    """Kill the agent of the struck machine while a backup is on its way into it."""
    index, step = context.machines.index(context.target), context.request.at_step
    before = context.agent(context.target)
    # Seen in the files: who hears of it from an agent, late, finds nothing on its way any more.
    await context.until(lambda: context.stored.newest() >= step, REACH_LIMIT_S, f"step {step} was not reached")

    def caught() -> bool:
        deadline = time.monotonic() + TRANSFER_LIMIT_S
        while time.monotonic() < deadline:
            if context.stored.receiving(index) is not None:
                return True
            time.sleep(0.0005)
        return False

    if not await asyncio.to_thread(caught):
        raise ClusterError(f"no backup was on its way to {context.target.name} within {TRANSFER_LIMIT_S:.0f} s")
    killed_ns = _kill(context, before)
    context.seen.absorbed = Absorbed(killed_ns, await context.agent_back(context.target, before))


async def _hang(context: DrillContext) -> None:
    """Stop the agent of the struck machine for some seconds while backups flow to it."""
    await context.reach(context.request.at_step)
    agent = cluster_processes.identify(context.agent(context.target))
    if agent is None:
        raise ClusterError(f"the agent of {context.target.name} is gone")
    others = [machine for machine in context.machines if machine is not context.target]
    stopped_ns = time.time_ns()
    try:
        context.mark(context.request.base, time_ns=stopped_ns)
        cluster_processes.send(agent, signal.SIGSTOP)
        await context.listen(context.request.seconds, others)
    finally:
        cluster_processes.send(agent, signal.SIGCONT)
    context.seen.absorbed = Absorbed(stopped_ns, time.time_ns())


async def _hang_several(context: DrillContext) -> None:
    """Stop the agents of several machines, then kill a rank of another one; then let them go on."""
    await context.reach(context.request.at_step)
    names = hung_machines(context.request, context.spec)
    hung = [cluster_processes.identify(context.agent(one)) for one in context.machines if one.name in names]
    agents = [agent for agent in hung if agent is not None]
    stopped_ns = time.time_ns()
    try:
        for agent in agents:
            cluster_processes.send(agent, signal.SIGSTOP)
        context.mark(context.request.base, time_ns=stopped_ns, victims=names)
        await context.second_fault(exact=False)
        await asyncio.sleep(context.request.seconds)
    finally:
        for agent in agents:
            cluster_processes.send(agent, signal.SIGCONT)
    context.seen.absorbed = Absorbed(stopped_ns, time.time_ns())


async def _damage(context: DrillContext) -> None:
    """Damage the newest copy of a rank, then kill what holds the better ones."""
    request, stored = context.request, context.stored
    step = await context.held_up()
    rank = request.struck_ranks(context.spec)[0]
    every = context.spec.checkpoint.disk_every_steps
    on_disk = step - step % every if every else 0
    await context.settled(step, disk=on_disk)
    backup = stored.backup(rank)
    if request.base == "truncate-file":
        done = damage.truncate(stored.on_disk(rank, on_disk, "safetensors"), rank, on_disk)
    elif request.where == "file":
        done = damage.flip_in_file(stored.on_disk(rank, on_disk, "safetensors"), rank, on_disk)
    elif request.where == "backup" and backup is not None:
        done = damage.flip_in_slot(backup, rank, max(stored.backup_steps(rank)))
    else:
        done = damage.flip_in_slot(stored.own(rank), rank, step)
    context.mark(request.base, path=str(done.path), what=done.what)
    context.seen.damaged.append(done)
    context.cluster.say(f"{done.path}: {done.what}")
    await context.second_fault(exact=True)


def _kill(context: DrillContext, pid: int) -> int:
    context.mark(context.request.fault, victim=pid)
    os.kill(pid, signal.SIGKILL)
    return time.time_ns()
