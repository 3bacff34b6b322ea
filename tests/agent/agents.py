"""Runs real agent processes on loopback, for the tests of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from agent.client import AgentClient
from agent.security import ClientSecurity, Presented
from agent.state.live import FOLDER
from agent.v1 import agent_pb2 as pb
from everstep.base.addresses import Address
from everstep.errors import AgentUnreachable
from everstep.system.listening import address_of, bound
from tests import templates
from tests.hosts import own_host

HOST = own_host(21)


def free_port(host: str) -> int:
    with bound(host, 0) as probe:
        return address_of(probe).port


def agent_command(address: str, state: Path, shm: Path, *options: str, machine: str = "m1") -> list[str]:
    command = [sys.executable, "-P", "-m", "console.main", "agent", "--machine", machine, "--listen", address]
    return [*command, "--state-dir", str(state), "--shm-dir", str(shm), *options]


class RunningAgent:
    """One agent process. It can be killed, and started again with the same folders.

    Args:
        folder: The folder for its files.
        options: More options for its command line.
        security: Token and certificate with which clients connect to it.
        machine: The name of its machine.
        alone: The agent starts its fork servers itself, as in production; otherwise the tests' template forks them.
        monitor: Settings of its inspections. By default there are none, because tests keep this computer busy.
        host: The address on which it listens.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        security: ClientSecurity | None = None,
        machine: str = "m1",
        alone: bool = False,
        monitor: str = "off = true",
        host: str = HOST,
    ) -> None:
        self.machine = machine
        self.monitor = monitor
        self.folder = folder
        self.state = folder / "state"
        self.shm = Path("/dev/shm") / f"everstep-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.live = self.shm / FOLDER
        """The agent's own data in shared memory."""
        self.fork_servers = self.live / "fork-servers"
        self.address = str(Address(host, free_port(host)))
        options = (*options, "--monitor", str(folder / "monitor.toml"))
        self.options = options if alone else (*options, "--template", str(templates.shared()))
        self.security = security or ClientSecurity.from_environment()
        self.process: subprocess.Popen[bytes] | None = None
        self.client = AgentClient(self.address, Presented(self.security))

    def left(self) -> list[str]:
        """Return the names of all files that jobs have in shared memory."""
        return [path.name for path in self.shm.iterdir() if path != self.live]

    def log(self) -> str:
        """Return the agent's own log."""
        return (self.folder / "agent.log").read_text()

    def command(self) -> list[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "monitor.toml").write_text(self.monitor)
        return agent_command(self.address, self.state, self.shm, *self.options, machine=self.machine)

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "agent.log").open("ab") as output:
            self.process = subprocess.Popen(self.command(), stdout=output, stderr=output)  # noqa: ASYNC220
        deadline = time.monotonic() + 30
        while True:
            try:
                await self.client.describe(timeout_s=2)
                return
            except AgentUnreachable:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise RuntimeError((self.folder / "agent.log").read_text()) from None
                await asyncio.sleep(0.05)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process
        self.process.send_signal(number)
        self.process.wait(20)
        self.process = None

    async def close(self) -> None:
        if self.process:
            with contextlib.suppress(Exception):
                for job in (await self.client.describe()).jobs:
                    await self.client.release(pb.ReleaseRequest(job=job.job), timeout_s=30)
        if self.process:
            self.kill(signal.SIGTERM)
        await self.client.close()
        if self.shm.exists():
            shutil.rmtree(self.live, ignore_errors=True)
            self.shm.rmdir()  # fails if a job left anything


class Job:
    """A job on a running agent, whose script is given as text."""

    def __init__(self, agent: RunningAgent, script: str, *, ranks: int = 2, args: tuple[str, ...] = ()) -> None:
        self.agent = agent
        self.name = f"job-{uuid.uuid4().hex[:8]}"
        self.path = agent.folder / f"{self.name}.py"
        self.path.write_text(script)
        self.ranks = ranks
        self.args = args

    async def prepare(self) -> pb.PrepareReply:
        return await self.agent.client.prepare(pb.PrepareRequest(request_id="prepare", job=self.name), timeout_s=60)

    def launch_request(self, generation: int = 1, request_id: str = "") -> pb.LaunchRequest:
        ranks = [
            pb.RankLaunch(rank=rank, env={"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(self.ranks)
        ]
        return pb.LaunchRequest(
            request_id=request_id or f"launch-{generation}",
            job=self.name,
            generation=generation,
            ranks=ranks,
            program=pb.Program(script=str(self.path), args=self.args),
            checkpoint=pb.CheckpointOptions(slots=2),
        )

    async def launch(self, generation: int = 1, request_id: str = "") -> pb.LaunchReply:
        return await self.agent.client.launch(self.launch_request(generation, request_id), timeout_s=60)

    async def stop(self, generation: int = 1, request_id: str = "", grace_s: float = 0.0) -> pb.StopReply:
        request = pb.StopRequest(
            request_id=request_id or f"stop-{generation}", job=self.name, generation=generation, grace_s=grace_s
        )
        return await self.agent.client.stop(request, timeout_s=60)

    async def release(self) -> pb.ReleaseReply:
        request = pb.ReleaseRequest(request_id="release", job=self.name)
        return await self.agent.client.release(request, timeout_s=60)

    async def observe(self, count: int, kind: str, after: int = 0) -> list[pb.Observation]:
        """Wait for the first ``count`` observations of a kind, and return them."""
        found: list[pb.Observation] = []
        async with asyncio.timeout(30):
            stream = self.agent.client.observe(pb.ObserveRequest(after_sequence=after, job=self.name))
            async for seen in stream:
                if seen.WhichOneof("what") == kind:
                    found.append(seen)
                if len(found) == count:
                    break
        return found

    async def exits(self, count: int) -> list[pb.Observation]:
        return await self.observe(count, "rank_ended")

    async def progress(self, ready: Callable[[pb.ProgressReply], bool]) -> pb.ProgressReply:
        """Return the first progress reply for which ``ready`` returns true."""
        async with asyncio.timeout(30):
            async for reply in self.agent.client.progress(pb.ProgressRequest(job=self.name, interval_s=0.02)):
                if ready(reply):
                    return reply
        raise AssertionError

    async def entered(self) -> pb.ProgressReply:
        """Wait until all ranks are in the script."""
        return await self.progress(
            lambda reply: len(reply.ranks) == self.ranks and all(rank.milestones.script_entered for rank in reply.ranks)
        )

    async def log(self, rank: int, stream: int = 0, tail: int = 0) -> bytes:
        request = pb.ReadLogRequest(job=self.name, rank=rank, stream=stream, tail_bytes=tail)  # type: ignore[arg-type]
        return b"".join([chunk.data async for chunk in self.agent.client.read_log(request)])


@contextlib.asynccontextmanager
async def running_agent(
    folder: Path,
    *options: str,
    security: ClientSecurity | None = None,
    machine: str = "m1",
    alone: bool = False,
) -> AsyncIterator[RunningAgent]:
    agent = RunningAgent(folder, *options, security=security, machine=machine, alone=alone)
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()


def alive(pid: int) -> bool:
    """Return whether a process exists. A zombie counts, because its parent has not collected it yet."""
    return Path(f"/proc/{pid}").exists()


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until ``condition`` returns true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s:g} s this is still not true: {what}"
        await asyncio.sleep(0.02)


async def prepared(agent: RunningAgent, script: str, *, ranks: int = 2, args: tuple[str, ...] = ()) -> Job:
    job = Job(agent, script, ranks=ranks, args=args)
    await job.prepare()
    return job
