"""Simulates the agents of many machines in one process, with real gRPC and without ranks.

The first line on stdout lists the machines as JSON. Each line on stdin is a command: ``kill RANK``, ``exit`` (all
ranks), ``refuse SHARE`` (the agents of a share of the machines stop), or ``serve`` (they start again). The answer to a
command is a line with the time by the wall clock, nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from agent.fake import Answer, FakeAgent, no_findings
from agent.v1 import agent_pb2 as pb

HOST = "127.0.0.32"


@dataclass(slots=True)
class Training:
    """The job that all machines run together."""

    ranks: int
    """Number of ranks on each machine."""
    step_s: float
    restart_s: float
    """Time from a launch to the first step, seconds."""
    generation: int = 0
    begun_with: int = 0
    stepping_at: float = 0.0
    """Time of the first complete step, ``time.monotonic``."""
    broken_at: float | None = None
    """Time at which a rank ended, so that no rank steps; None: the ranks step."""

    def launch(self, generation: int, resume_step: int) -> None:
        """Begin the next generation; only the first agent that launches it changes anything."""
        if generation > self.generation:
            self.generation, self.begun_with, self.broken_at = generation, max(resume_step, 0), None
            self.stepping_at = time.monotonic() + self.restart_s

    def steps(self) -> int:
        """Return the number of steps that all ranks have completed."""
        now = time.monotonic() if self.broken_at is None else self.broken_at
        done = (now - self.stepping_at) // self.step_s + 1 if now >= self.stepping_at else 0
        return self.begun_with + int(done)

    def wait_s(self) -> float:
        """Return the time until the next change, at most one second."""
        left = self.stepping_at - time.monotonic()
        return min(1.0, left if left > 0 else self.step_s - -left % self.step_s) + 0.001


class SimulatedAgent(FakeAgent):
    """The agent of one simulated machine.

    It keeps its observations in memory: a real log would write 8,000 of them at once, which would block all agents
    here.
    """

    def __init__(self, index: int, machines: int, training: Training) -> None:
        self.index = index
        self.machines = machines
        self.training = training
        self.launched = 0
        self.stopped = 0
        self.ended: dict[int, pb.Exit] = {}
        """Rank → its end, in the current generation."""
        self.observations: list[pb.Observation] = []
        self.news = asyncio.Event()
        name = f"machine-{index:04d}"
        super().__init__(
            name,
            describe=pb.DescribeReply(machine=name),
            prepare=pb.PrepareReply(fork_server_pid=1),
            start_store=pb.StartStoreReply(host=HOST, port=1),
            launch=self._launch,
            stop=self._stop,
            restore=lambda r: pb.RestoreReply(shards=[pb.ShardRestored(rank=one.rank, ok=True) for one in r.shards]),
            release=pb.ReleaseReply(),
            acknowledge=pb.AcknowledgeReply(),
            persist=pb.PersistReply(),
            align_backups=pb.AlignBackupsReply(),
            observe=self._observe,
            progress=self._progress,
            diagnose=self._diagnose,
        )

    def ranks(self, machine: int | None = None) -> range:
        """Return the ranks of a machine, by default of this one."""
        first = self.training.ranks * (self.index if machine is None else machine)
        return range(first, first + self.training.ranks)

    def end(self, rank: int, end: pb.Exit, job: str) -> None:
        """Let a rank end, and observe that."""
        self.ended[rank] = end
        number = len(self.observations) + 1
        self.observations.append(
            pb.Observation(
                sequence=number,
                id=f"{self.machine}-{number}",
                machine=self.machine,
                job=job,
                generation=self.launched,
                time_ns=end.time_ns,
                rank_ended=pb.RankEnd(rank=rank, exit=end, completed_steps=self.training.steps()),
            )
        )
        self.news.set()

    def _launch(self, request: pb.LaunchRequest) -> pb.LaunchReply:
        """Launch the ranks."""
        self.training.launch(request.generation, request.resume_step)
        self.launched = request.generation
        self.ended.clear()
        self.news.set()
        now = time.time_ns()
        ranks = [pb.RankProcess(rank=one.rank, pid=1000 + one.rank, forked_ns=now) for one in request.ranks]
        return pb.LaunchReply(generation=request.generation, ranks=ranks)

    def _stop(self, request: pb.StopRequest) -> pb.StopReply:
        """Stop the ranks. The reply has copies of two steps: those of these ranks, and backups of a neighbour's
        ranks."""
        self.stopped, now, steps = request.generation, time.time_ns(), self.training.steps()
        killed = pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=now)
        neighbour = self.ranks((self.index + 1) % self.machines)
        kinds = [(pb.HeldCheckpoint.OWN, self.ranks()), (pb.HeldCheckpoint.BACKUP, neighbour)]
        return pb.StopReply(
            ranks=[
                pb.RankEnd(
                    rank=rank,
                    generation=self.launched,
                    pid=1000 + rank,
                    exit=self.ended.get(rank, killed),
                    stopped_by_us=rank not in self.ended,
                    completed_steps=steps,
                    log_tail="a line of output\n" * 30,
                )
                for rank in self.ranks()
            ],
            checkpoints=[
                pb.HeldCheckpoint(
                    rank=rank,
                    completed_steps=step,
                    valid=True,
                    tier=tier,
                    bytes=10**7,
                    saved_ns=10**18 + step,
                    generation=self.launched,
                    run=request.run,
                )
                for tier, ranks in kinds
                for rank in ranks
                for step in (steps - 1, steps)
                if step > 0
            ],
        )

    def _diagnose(self, request: pb.DiagnoseRequest) -> Answer:
        """Pass all tests. The replies are as large as those for 8 ranks; the bits of machine 7 differ."""
        replies = no_findings(request)
        for reply in replies if isinstance(replies, list) else []:
            if reply.HasField("result") and reply.result.name == "bitwise":
                reply.result.kind = "a kind of machine, with the sizes of the model " * 5
                for rank in range(8):
                    for what in ("gradients", "parameters"):
                        reply.result.digests[f"rank {rank} {what}"] = f"{rank + (self.index == 7):064x}"
            elif reply.HasField("result"):
                reply.result.measures["bytes_per_second"] = 1e9 + self.index
        return replies

    async def _observe(self, request: pb.ObserveRequest) -> AsyncIterator[pb.Observation]:
        """Yield all observations after a number, and then each new one."""
        after = request.after_sequence
        while True:
            for observation in self.observations[after:]:
                after = observation.sequence
                yield observation
            await self._wait(60.0)

    async def _progress(self, request: pb.ProgressRequest) -> AsyncIterator[pb.ProgressReply]:
        """Yield the progress of the ranks, at each change and once a second."""
        while True:
            yield self._ranks_now()
            await self._wait(self.training.wait_s())

    async def _wait(self, seconds: float) -> None:
        news = self.news
        try:
            async with asyncio.timeout(seconds):
                await news.wait()
        except TimeoutError:
            return
        if self.news is news:
            self.news = asyncio.Event()

    def _ranks_now(self) -> pb.ProgressReply:
        now, steps, training = time.time_ns(), self.training.steps(), self.training
        if not self.launched:
            return pb.ProgressReply(time_ns=now)
        first = now if steps > training.begun_with else 0
        ranks = [
            pb.RankProgress(
                rank=rank,
                generation=self.launched,
                pid=1000 + rank,
                alive=rank not in self.ended and self.stopped < self.launched,
                attached=True,
                completed_steps=steps,
                milestones=pb.Milestones(forked=1, script_entered=1, joined=1, loop_entered=1, first_step=first),
                exit=self.ended.get(rank),
                saved=pb.SavedState(
                    own_step=steps, own_ns=now, backup_step=steps, disk_step=-1, disk_wanted=-1, remote_step=-1
                ),
            )
            for rank in self.ranks()
        ]
        return pb.ProgressReply(time_ns=now, generation=self.launched, ranks=ranks)


class Simulation:
    """All agents, each with a server of its own."""

    def __init__(self, machines: int, training: Training, job: str) -> None:
        self.job, self.training = job, training
        self.agents = [SimulatedAgent(index, machines, training) for index in range(machines)]
        self._gone = self.agents

    async def serve(self) -> None:
        """Start the agents that do not run."""
        for agent in self._gone:
            await agent.start(agent.address or f"{HOST}:0")
        self._gone = []

    def machines(self) -> list[dict[str, str]]:
        """Return the names and addresses of the machines."""
        return [{"name": agent.machine, "address": agent.address} for agent in self.agents]

    async def carry_out(self, line: str) -> None:
        """Carry out one command, and print the time."""
        command, *arguments = line.split()
        now = time.time_ns()
        match command:
            case "kill":
                self.training.broken_at = time.monotonic()
                rank = int(arguments[0])
                agent = self.agents[rank // self.training.ranks]
                agent.end(rank, pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=now), self.job)
            case "exit":
                self.training.broken_at = time.monotonic()
                for agent in self.agents:
                    for rank in agent.ranks():
                        agent.end(rank, pb.Exit(kind=pb.Exit.CODE, value=1, time_ns=now + rank), self.job)
            case "refuse":
                every = round(1 / float(arguments[0]))
                self._gone = self.agents[::every]
                await asyncio.gather(*(agent.stop() for agent in self._gone))
            case "serve":
                await self.serve()
        print(now, flush=True)


async def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=5.0)
    parser.add_argument("--restart-s", type=float, default=2.0)
    parser.add_argument("--job", default="large")
    given = parser.parse_args()
    simulation = Simulation(given.machines, Training(given.ranks, given.step_s, given.restart_s), given.job)
    await simulation.serve()
    gc.freeze()  # a garbage collection of these objects, which all stay, would block all agents for 0.3 s
    print(json.dumps(simulation.machines()), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await simulation.carry_out(line)


if __name__ == "__main__":
    asyncio.run(main())
