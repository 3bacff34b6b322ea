"""Runs a job on several agents with one rank each. Each agent keeps a backup of another agent's rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from agent.v1 import agent_pb2 as pb
from everstep.slots.reader import SlotReader
from tests.agent.agents import HOST, RunningAgent, until

SIZE = 400_000

SAVES = """
import os, random, sys, time
from pathlib import Path
from everstep.rank.step_reports import ReportFile
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner

size, pause, world = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
rank, generation = os.environ["RANK"], int(os.environ["EVERSTEP_GENERATION"])
first = max(int(os.environ["EVERSTEP_RESUME_STEP"]), 0)
report = ReportFile.open(Path(os.environ["EVERSTEP_REPORT_FILE"]))
report.attach()
slots = int(os.environ["EVERSTEP_CHECKPOINT_SLOTS"])
owner = SlotOwner(os.environ["EVERSTEP_JOB"], os.environ["EVERSTEP_RUN"], int(os.environ["RANK"]))
file = SlotFile(
    Path(os.environ["EVERSTEP_CHECKPOINT_FILE"]), slots=slots, owner=owner, generation=generation
)

def ring():
    try:
        signal = os.open(os.environ["EVERSTEP_SAVE_SIGNAL"], os.O_WRONLY | os.O_NONBLOCK)
        os.write(signal, b".")
        os.close(signal)
    except OSError:
        pass  # no agent at the moment

def state(step):
    return random.Random(f"{os.environ.get('EVERSTEP_TEST_RUN', '')}{rank}/{step}").randbytes(size)

if first:
    assert bytes(file.load(first).tensors) == state(first), f"rank {rank} restored something else at step {first}"
report.complete(first)

def at(rank):
    return Path(f"{__file__}.{generation}.{rank}")

def reached(rank, step):
    try:
        return int(at(rank).read_text() or 0) >= step
    except FileNotFoundError:
        return False

hold = Path(f"{__file__}.hold")
for step in range(first + 1, 1_000_000):
    at(rank).write_text(str(step))
    while hold.exists() or not all(reached(other, step) for other in range(world)):  # as a collective would
        time.sleep(0.001)
    file.begin(b"{}", size)
    file.tensors()[:] = state(step)
    file.commit(step)
    ring()
    report.report(step - 1, 1.0, 1.0, 1)
    report.complete(step)
    time.sleep(pause)
"""


def state(rank: int, step: int, size: int = SIZE, *, run: str = "") -> bytes:
    """Return the state that a rank saves after a step."""
    return random.Random(f"{run}{rank}/{step}").randbytes(size)


class Machines:
    """One job on agents m1, m2, …, with one rank on each."""

    def __init__(self, agents: Sequence[RunningAgent], folder: Path) -> None:
        self.agents = agents
        self.job = f"job-{uuid.uuid4().hex[:8]}"
        self.script = folder / "saves.py"
        self.script.write_text(SAVES)
        self.options: dict[str, object] = {"slots": 3, "backup": True, "backup_slots": 2, "backup_every_steps": 1}

        self.in_step = True
        """Whether ranks wait for each other before each step, as collectives would make them wait."""
        self.run = ""
        """The run that every command names. The states of different runs differ."""

    async def close(self) -> None:
        """End the job on all agents. Some of the agents may be killed or suspended."""
        for agent in self.agents:
            if agent.process is None:
                await agent.start()
            agent.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
            await agent.client.release(pb.ReleaseRequest(request_id="release", job=self.job), timeout_s=60)
            assert not (agent.shm / self.job).exists()

    async def prepare(self) -> None:
        request = pb.PrepareRequest(request_id=f"prepare-{self.run}", job=self.job, run=self.run)
        await asyncio.gather(*(agent.client.prepare(request, timeout_s=60) for agent in self.agents))

    def launch_request(
        self, index: int, generation: int, resume_step: int, *, pause: float, peers: Sequence[int]
    ) -> pb.LaunchRequest:
        peer = self.agents[peers[index]]
        return pb.LaunchRequest(
            request_id=f"launch-{generation}-{self.run}",
            job=self.job,
            generation=generation,
            ranks=[pb.RankLaunch(rank=index, env={"RANK": str(index), "LOCAL_RANK": "0"})],
            program=pb.Program(
                script=str(self.script),
                args=[str(SIZE), str(pause), str(int(self.in_step) and len(self.agents))],
                env={"EVERSTEP_TEST_RUN": self.run},
            ),
            resume_step=resume_step,
            checkpoint=pb.CheckpointOptions(**self.options),  # type: ignore[arg-type]
            peers=[pb.BackupPeer(rank=index, machine=peer.machine, address=peer.address)],
            run=self.run,
        )

    async def launch(
        self,
        generation: int = 1,
        resume_step: int = 0,
        *,
        pause: float = 0.05,
        peers: Sequence[int] = (),
    ) -> None:
        """Launch a generation; agent ``peers[i]`` keeps the backup of rank ``i``, by default in a ring."""
        count = len(self.agents)
        chosen = peers or [(i + 1) % count for i in range(count)]
        await asyncio.gather(
            *(
                agent.client.launch(
                    self.launch_request(i, generation, resume_step, pause=pause, peers=chosen), timeout_s=60
                )
                for i, agent in enumerate(self.agents)
            )
        )

    async def stop(self, generation: int, *which: int) -> list[pb.StopReply]:
        request = pb.StopRequest(
            request_id=f"stop-{generation}-{uuid.uuid4().hex}", job=self.job, generation=generation, run=self.run
        )
        agents = [self.agents[i] for i in which] or self.agents
        return list(await asyncio.gather(*(agent.client.stop(request, timeout_s=60) for agent in agents)))

    async def until(self, index: int, ready: Callable[[pb.RankProgress], bool], what: str) -> pb.RankProgress:
        """Return the first report of a machine's rank for which ``ready`` returns true."""
        seen = None
        try:
            async with asyncio.timeout(45):
                request = pb.ProgressRequest(job=self.job, interval_s=0.02)
                async for reply in self.agents[index].client.progress(request):
                    for seen in reply.ranks:
                        if ready(seen):
                            return seen
        except TimeoutError:
            raise AssertionError(f"after 45 s this is still not true: {what}; the last report was {seen}") from None
        raise AssertionError

    def shm(self, index: int) -> Path:
        return self.agents[index].shm / self.job

    def payload(self, index: int, name: str, step: int) -> bytes:
        with contextlib.closing(SlotReader(self.shm(index) / name)) as reader:
            header = reader.header(step)
            assert header is not None, f"{name} on machine {index} holds {reader.headers()}"
            assert reader.intact(header)
            found = bytearray(header.tensor_bytes)
            reader.read_into(header, 0, memoryview(found))
            return bytes(found)

    async def lose(self, index: int) -> None:
        """Lose a machine with its processes and files. Then start its agent again without them."""
        agent = self.agents[index]
        pids = [rank.pid for job in (await agent.client.describe()).jobs for rank in job.ranks if rank.alive]
        servers = [job.fork_server_pid for job in (await agent.client.describe()).jobs]
        agent.kill()
        for pid in (*pids, *servers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await until(lambda: not any(map(runs, pids)), "the ranks are gone")
        shutil.rmtree(agent.shm)
        shutil.rmtree(agent.state)
        await agent.start()


def runs(pid: int) -> bool:
    """Return whether a process runs; a zombie does not run."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


@contextlib.asynccontextmanager
async def running_agents(
    folder: Path, count: int, *options: str, host: str = HOST
) -> AsyncIterator[list[RunningAgent]]:
    """Run agents m1, m2, …"""
    agents = [RunningAgent(folder / f"m{i + 1}", *options, machine=f"m{i + 1}", host=host) for i in range(count)]
    try:
        await asyncio.gather(*(agent.start() for agent in agents))
        yield agents
    finally:
        for agent in agents:
            await agent.close()


@contextlib.asynccontextmanager
async def job_on(agents: Sequence[RunningAgent], folder: Path) -> AsyncIterator[Machines]:
    """Prepare a job on agents, and end it afterwards."""
    found = Machines(agents, folder)
    await found.prepare()
    try:
        yield found
    finally:
        await found.close()
