"""What the injector does from outside: to agents, fork servers and machines, and to copies of state."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from controlplane.local import procfs
from drills.inject import damage
from drills.inject.away import take_away
from drills.inject.context import LOOK_S, DrillContext
from drills.inject.full_disks import fill_disk, fill_memory
from drills.observe.observed import Absorbed
from drills.observe.processes import await_rank_of, children
from drills.spec.catalogue import AWAY
from everstep import faults
from everstep.errors import ClusterError

LAUNCH_LIMIT_S = 60.0
TRANSFER_LIMIT_S = 60.0
"""A backup is on its way within this long (ours)."""
REACH_LIMIT_S = 300.0
"""A job has started and come to the step within this long (ours)."""


async def inject(scene: DrillContext) -> None:
    """Do what the drill's fault is, once the job has come to the step.

    Raises:
        ClusterError: the job or the cluster is not as it would have to be.
    """
    try:
        match scene.request.base:
            case "kill-machine" | "kill-group":
                await scene.reach(scene.request.at_step)
                await scene.strike(exact=False)
            case "flip-bit" | "truncate-file":
                await _damage(scene)
            case "shm-full":
                await fill_memory(scene)
            case "disk-full":
                await fill_disk(scene)
            case base if base in AWAY:
                await take_away(scene)
            case "hang-peer":
                await _hang(scene)
            case "kill-peer":
                await _kill_in_transfer(scene)
            case _ if scene.request.during == "launch":
                await _kill_in_launch(scene)
            case "kill-forkserver":
                await _kill_fork_server(scene)
            case _:
                await scene.reach(scene.request.at_step)
                await _kill_agent(scene)
        if scene.request.struck_again:
            await scene.settled(await scene.held_up())
            await scene.strike(exact=True)
    finally:
        scene.given.let_go()


async def _kill_agent(scene: DrillContext) -> None:
    """Kill the agent of the struck machine, and wait until it is back."""
    before = scene.agent(scene.struck)
    killed_ns = _kill(scene, before)
    scene.seen.absorbed = Absorbed(killed_ns, await scene.agent_back(scene.struck, before))


async def _kill_fork_server(scene: DrillContext) -> None:
    await scene.reach(scene.request.at_step)
    before = await scene.fork_server(scene.struck)
    if not before:
        raise ClusterError(f"the job has no fork server on {scene.struck.name}")
    killed_ns = _kill(scene, before)
    scene.seen.absorbed = Absorbed(killed_ns, await scene.fork_server_back(scene.struck, before))


async def _kill_in_launch(scene: DrillContext) -> None:
    """Kill the agent as soon as its fork server forked the first rank of the next generation."""
    await scene.reach(1, [scene.struck])
    fork_server = await scene.fork_server(scene.struck)
    known = set(children(fork_server))
    while faults.fired(scene.given.plan, scene.given.ranks[0]) is None:  # noqa: ASYNC110 - a rank says so, by a file
        await asyncio.sleep(LOOK_S)
    before = scene.agent(scene.struck)
    if await asyncio.to_thread(await_rank_of, fork_server, known, LAUNCH_LIMIT_S) is None:
        raise ClusterError(f"no rank was launched on {scene.struck.name} within {LAUNCH_LIMIT_S:.0f} s")
    killed_ns = _kill(scene, before)
    scene.seen.absorbed = Absorbed(killed_ns, await scene.agent_back(scene.struck, before))


async def _kill_in_transfer(scene: DrillContext) -> None:
    """Kill the agent of the struck machine while a backup is on its way into it."""
    index, step = scene.machines.index(scene.struck), scene.request.at_step
    before = scene.agent(scene.struck)
    # Seen in the files: who hears of it from an agent, late, finds nothing on its way any more.
    await scene.until(lambda: scene.stored.newest() >= step, REACH_LIMIT_S, f"step {step} was not reached")

    def caught() -> bool:
        deadline = time.monotonic() + TRANSFER_LIMIT_S
        while time.monotonic() < deadline:
            if scene.stored.receiving(index) is not None:
                return True
            time.sleep(0.0005)
        return False

    if not await asyncio.to_thread(caught):
        raise ClusterError(f"no backup was on its way to {scene.struck.name} within {TRANSFER_LIMIT_S:.0f} s")
    killed_ns = _kill(scene, before)
    scene.seen.absorbed = Absorbed(killed_ns, await scene.agent_back(scene.struck, before))


async def _hang(scene: DrillContext) -> None:
    """Stop the agent of the struck machine for some seconds while backups flow to it."""
    await scene.reach(scene.request.at_step)
    agent = procfs.identify(scene.agent(scene.struck))
    if agent is None:
        raise ClusterError(f"the agent of {scene.struck.name} is gone")
    others = [one for one in scene.machines if one is not scene.struck]
    stopped_ns = time.time_ns()
    try:
        scene.mark(scene.request.base, time_ns=stopped_ns)
        procfs.send(agent, signal.SIGSTOP)
        await scene.listen(scene.request.seconds, others)
    finally:
        procfs.send(agent, signal.SIGCONT)
    scene.seen.absorbed = Absorbed(stopped_ns, time.time_ns())


async def _damage(scene: DrillContext) -> None:
    """Damage the newest copy of a rank, then kill what holds the better ones."""
    request, stored = scene.request, scene.stored
    step = await scene.held_up()
    rank = request.struck_ranks(scene.spec)[0]
    every = scene.spec.checkpoint.disk_every_steps
    on_disk = step - step % every if every else 0
    await scene.settled(step, disk=on_disk)
    backup = stored.backup(rank)
    if request.base == "truncate-file":
        done = damage.truncate(stored.on_disk(rank, on_disk, "safetensors"), rank, on_disk)
    elif request.where == "file":
        done = damage.flip_in_file(stored.on_disk(rank, on_disk, "safetensors"), rank, on_disk)
    elif request.where == "backup" and backup is not None:
        done = damage.flip_in_slot(backup, rank, max(stored.backup_steps(rank)))
    else:
        done = damage.flip_in_slot(stored.own(rank), rank, step)
    scene.mark(request.base, path=str(done.path), what=done.what)
    scene.seen.damaged.append(done)
    scene.cluster.say(f"{done.path}: {done.what}")
    await scene.strike(exact=True)


def _kill(scene: DrillContext, pid: int) -> int:
    scene.mark(scene.request.fault, victim=pid)
    os.kill(pid, signal.SIGKILL)
    return time.time_ns()
