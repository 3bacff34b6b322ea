"""This module checks each need of an agent (``agent.needs``), on its machine and with its rights.

A check tries what the agent would do, where that is possible. It returns what it found. If the need is not met, it
raises ``Lacks``; any other error means that the check could not be made, so its verdict is unknown.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from agent import needs
from agent.jobs.host import interface_of
from agent.monitor import programs
from agent.monitor.gpu import pci
from agent.monitor.gpu.process import GpuProcess
from agent.monitor.gpu.reading import GpuTrouble
from agent.monitor.gpu.rules.available import NO_ACCESS
from agent.monitor.host.clock import is_synced
from agent.monitor.kernel.log import KernelLog
from agent.monitor.network.used import GLOO_SOCKETS, NCCL_SOCKETS, uses_interface
from agent.needs import Need
from agent.tracer.stack_dump import dump, py_spy
from agent.tracer.tracer import NO_PY_SPY
from agent.v1 import agent_pb2 as pb
from everstep.base.text import size_text
from everstep.errors import AgentError, CannotInspect, Lacks
from everstep.model.finding import Health
from everstep.system import procfs
from everstep.system.capabilities import Capability, has
from everstep.system.memory import is_killed_as_group

ANSWER_S = 15.0
"""The verdict of a check that takes longer is unknown, seconds; the first use of the GPUs may take some seconds."""
STACKS_S = 5.0
"""Time limit of py-spy, seconds."""
GPUS_S = 10.0
"""Time limit of NVML, seconds."""
UNIT_S = 5.0
"""Time limit of ``systemctl``, seconds."""
SHM_WANTED = 1 << 30
"""Shared memory for the reports and checkpoints of a small job, bytes."""
TARGET = "print(flush=True); input()"
"""A program whose stacks are read."""
SYS, DEV = Path("/sys"), Path("/dev")

Reach = Callable[[str], Awaitable[str]]
"""Reaches the agent at an address, and its data port; returns the name of its machine."""


class SetupChecks:
    """Checks all needs of an agent.

    Args:
        host: Address that the agent listens on.
        shm_dir: The agent's folder in shared memory.
        reach: Reaches another agent.
    """

    def __init__(self, host: str, shm_dir: Path, reach: Reach) -> None:
        self._reach = reach
        self._one = asyncio.Lock()
        self._checks: dict[Need, Callable[[], str]] = {
            needs.KERNEL_LOG: kernel_log,
            needs.PTRACE: ptrace,
            needs.OOM_SCORE: oom_score,
            needs.OOM_GROUP: oom_group,
            needs.SHARED_MEMORY: partial(shared_memory, shm_dir),
            needs.MEMLOCK: memlock,
            needs.GPUS: gpus,
            needs.NETWORK: partial(network, host),
            needs.RDMA: rdma,
            needs.CLOCK: clock,
        }

    async def run(self, peer: str = "", address: str = "") -> list[pb.SetupCheck]:
        """Run all checks at the same time; requests are served in sequence, because checks start processes.

        Args:
            peer: Name of a machine whose agent has to be reachable; empty: no other machine is tried.
            address: ``host:port`` of that agent.
        """
        async with self._one:
            made = [_made(need, asyncio.to_thread(check)) for need, check in self._checks.items()]
            if address:
                made.append(_made(needs.PORTS, self._ports(peer, address)))
            return list(await asyncio.gather(*made))

    async def _ports(self, peer: str, address: str) -> str:
        try:
            name = await self._reach(address)
        except (AgentError, OSError) as error:
            # Many machines may have this problem, and equal texts are shown once.
            raise needs.PORTS.lacked(str(error).replace(address, "its address")) from error
        if name != peer:
            raise CannotInspect(f"the agent at {address} has the name {name}, not {peer}")
        return "another agent and its data port can be reached"


async def _made(need: Need, check: Awaitable[str]) -> pb.SetupCheck:
    try:
        async with asyncio.timeout(ANSWER_S):
            return pb.SetupCheck(name=need.name, verdict=Health.HEALTHY, text=await check)
    except Lacks as lack:
        return pb.SetupCheck(name=need.name, verdict=Health.FAULTY, text=lack.problem, remedy=lack.remedy)
    except TimeoutError:
        text = f"the check did not end within {ANSWER_S:g} s"
    except (AgentError, OSError, subprocess.SubprocessError) as error:
        text = f"it could not be checked: {error}"
    return pb.SetupCheck(name=need.name, verdict=Health.UNKNOWN, text=text)


def kernel_log(path: Path = DEV / "kmsg") -> str:
    """Read a line of the kernel log."""
    log = KernelLog(path)
    try:
        next(log.read(0.0), None)
    finally:
        log.close()
    return f"{path} can be read"


def ptrace(target: str = TARGET) -> str:
    """Read the stacks of a process that has the rights of a rank.

    Args:
        target: A Python program that prints a line when it is ready, and then waits for its input.
    """
    program = py_spy()
    if program is None:
        raise CannotInspect(NO_PY_SPY)
    # Like a rank, it is a child of the agent and not of py-spy.
    command = [sys.executable, "-I", "-S", "-c", target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        ticks = procfs.start_ticks(process.pid)
        found = dump(process.pid, ticks, deadline=time.monotonic() + STACKS_S, program=[program])
        process.kill()
    if found.denied:
        raise needs.PTRACE.lacked("py-spy may not read the stacks of a process")
    if not found.json:
        raise CannotInspect(found.problem)
    return "py-spy can read the stacks of processes"


def oom_score() -> str:
    """Read whether the kernel spares this process when memory is used up."""
    adjustment = procfs.own_oom_adjustment()
    if adjustment >= 0:
        raise needs.OOM_SCORE.lacked(f"oom_score_adj of the agent is {adjustment}")
    return f"oom_score_adj of the agent is {adjustment}"


def oom_group() -> str:
    """Read whether the kernel or systemd ends the agent when a rank is killed for its memory."""
    if group := is_killed_as_group():
        raise needs.OOM_GROUP.lacked(f"memory.oom.group is 1 in {group}")
    if unit := needs.unit():
        command = ["systemctl", "show", unit, "--property", "OOMPolicy", "--value"]
        policy = programs.run(command, UNIT_S).output.strip()
        if policy in {"stop", "kill"}:
            raise needs.OOM_GROUP.lacked(f"OOMPolicy of {unit} is {policy}")
    return "a rank is killed alone"


def shared_memory(folder: Path) -> str:
    """Read the size of shared memory."""
    size = shutil.disk_usage(folder).total
    if size < SHM_WANTED:
        raise needs.SHARED_MEMORY.lacked(f"shared memory has {size_text(size)}")
    return f"shared memory has {size_text(size)}"


def memlock(sys: Path = SYS) -> str:
    """Read how much memory ranks may lock."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or has(Capability.IPC_LOCK):
        return "any amount of memory may be locked"
    if _rdma_devices(sys):
        raise needs.MEMLOCK.lacked(f"only {size_text(limit)} of memory may be locked")
    return f"{size_text(limit)} of memory may be locked; without InfiniBand and RoCE, no more is needed"


def gpus(sys: Path = SYS, proc: Path = procfs.PROC, dev: Path = DEV) -> str:
    """Read the GPUs with NVML."""
    if not pci.worth_reading(sys, proc, dev):
        return "the machine has no NVIDIA GPU"
    process = GpuProcess(["--sys", str(sys), "--proc", str(proc)])
    try:
        reading = process.read(GPUS_S, GPUS_S)
    finally:
        process.end()
    if reading.trouble in {*NO_ACCESS, GpuTrouble.NO_DRIVER}:
        raise needs.GPUS.lacked(f"the machine has NVIDIA GPUs, but NVML cannot be used: {reading.text}")
    if reading.trouble:
        raise CannotInspect(f"NVML does not answer: {reading.text}")
    return f"NVML shows {len(reading.gpus)} GPUs"


def network(host: str) -> str:
    """Find the interface of the agent's address, and interfaces that the agent's variables name."""
    names = [name for _, name in socket.if_nameindex()]
    for variable in (GLOO_SOCKETS, NCCL_SOCKETS):
        value = os.environ.get(variable)
        if value and not any(uses_interface(name, [{variable: value}]) for name in names):
            remedy = f"correct {variable} in the agent's environment"
            raise needs.NETWORK.lacked(f"{variable}={value} names no interface of the machine", remedy)
    name = interface_of(host)
    if not name:
        raise needs.NETWORK.lacked(f"no interface of the machine has the agent's address {host}")
    return f"gloo and NCCL use {name}, unless a variable names another interface"


def rdma(sys: Path = SYS, dev: Path = DEV) -> str:
    """Find the device files of InfiniBand and RoCE."""
    devices = _rdma_devices(sys)
    if not devices:
        return "the machine has no InfiniBand or RoCE device"
    if not any(os.access(file, os.R_OK | os.W_OK) for file in (dev / "infiniband").glob("uverbs*")):
        raise needs.RDMA.lacked(f"the machine has {', '.join(devices)}, but no file in {dev}/infiniband can be opened")
    return "device files of InfiniBand or RoCE can be opened"


def clock() -> str:
    """Read whether the clock is synchronized."""
    if not is_synced():
        raise needs.CLOCK.lacked("no time service synchronizes the clock")
    return "a time service synchronizes the clock"


def _rdma_devices(sys: Path) -> list[str]:
    return sorted(device.name for device in (sys / "class/infiniband").glob("*"))
